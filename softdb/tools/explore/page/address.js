// What stands in the address after #: an answered question and its settings, one entry of the history a question.

const TEXTS = ["text", "id", "vector", "words", "right"], CHOICES = ["ranking", "way", "shown"];
const isNumber = (most) => (value) => Number(value) > 0 && Number(value) <= most;
const NUMBERS = { temperature: isNumber(Number.MAX_VALUE), k: (value) => isNumber(1e6)(value) && Number.isInteger(Number(value)), rtol: isNumber(1), trained: (value) => isNumber(1e4)(value) && Number.isInteger(Number(value)) };

const isFilter = (text) => {
  try {
    return typeof JSON.parse(text) === "object";
  } catch {
    return false;
  }
};

// The settings of an address, and those that mean nothing here.
export function recalled(hash, isChoice) {
  const given = {}, wrong = [];
  for (const [name, value] of new URLSearchParams(hash.slice(1))) {
    const good = TEXTS.includes(name) || (CHOICES.includes(name) && isChoice(name, value)) || (["where", "moves"].includes(name) && isFilter(value)) || (Object.hasOwn(NUMBERS, name) && NUMBERS[name](value));
    if (good && value.trim()) given[name] = value;
    else wrong.push(name);
  }
  const [, ...more] = ["text", "id", "vector"].filter((name) => given[name]);
  return { given, wrong: [...wrong, ...more] };
}

export class Trail {
  // A typed question replaces the one typed before it, until the box is left or Enter ends it.
  begin() {
    this.typed = false;
  }

  add(settings, by) {
    const { temperature: _, ...question } = settings, written = JSON.stringify(question);
    const isNew = this.written !== undefined && written !== this.written && by !== "link" && !(by === "typed" && this.typed);
    this.written = written;
    this.typed = by === "typed";
    clearTimeout(this.later);
    this.settings = settings;
    history[isNew ? "pushState" : "replaceState"](null, "", `#${new URLSearchParams(settings)}`);
  }

  // A slider that moves would change the address more often than browsers allow.
  heat(settings) {
    this.settings = settings;
    clearTimeout(this.later);
    this.later = setTimeout(() => this.here(), 400);
  }

  // The address with the newest settings.
  here() {
    if (this.settings) history.replaceState(null, "", `#${new URLSearchParams(this.settings)}`);
    return location.href;
  }
}
