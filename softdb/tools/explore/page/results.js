// What an answer shows: the records and their weights, the soft answer, numbers as people read them.

export const make = (tag, name = "", text = null) => {
  const one = document.createElement(tag);
  if (name) one.className = name;
  if (text !== null) one.textContent = text; // text, whatever is stored: never markup
  return one;
};

const counts = new Intl.NumberFormat("en");
export const count = (n) => counts.format(n);
export const about = (x) => (x >= 10 ? count(Math.round(x)) : x.toFixed(1));
export const share = (w) => {
  if (!w) return "0 %";
  return w >= 0.9995 && w < 1 ? "> 99.9 %" : w >= 0.01 ? `${(100 * w).toFixed(1)} %` : w >= 1e-5 ? `${(100 * w).toPrecision(2)} %` : "≈ 0 %";
};
export const short = (x) => (x === null || !Number.isFinite(x) ? "–" : x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e5) ? x.toExponential(2) : x.toPrecision(4));

const bar = (weight) => {
  const outer = make("div", "bar"), inner = make("i");
  outer.setAttribute("aria-hidden", "true");
  inner.style.width = `${100 * weight}%`;
  outer.append(inner);
  return outer;
};

// The list of hits, made once a question; `weigh` then changes the weights in place.
export function showHits(list, answer, onVisit, onRight) {
  list.replaceChildren(...answer.hits.map((hit, i) => hitLine(hit, answer.scores[i], answer.places[i] !== null, i, onVisit, onRight)));
  if (!answer.hits.length) list.append(make("li", "empty", "No record matches. Loosen the filter, or ask otherwise."));
}

function hitLine(hit, score, keyed, i, onVisit, onRight) {
  const line = make("li"), middle = make("div", "middle"), head = make("p", "head"), weight = make("div", "weight"), parts = make("ul", "parts");
  const name = hit.title || hit.shown_id, fields = hit.payload.filter(([, value]) => value !== hit.title);
  line.dataset.id = hit.id;
  head.append(make("span", "name", name));
  if (hit.title) head.append(" ", make("span", "own-id", hit.shown_id));
  const text = hit.text !== null && hit.text !== hit.title ? hit.text : fields.map((pair) => pair.filter(Boolean).join(": ")).join(" · ");
  const actions = make("span", "actions");
  if (hit.id && keyed) actions.append(button("Ask by this", `Ask by this: ${name}`, () => onVisit(hit.id)));
  if (hit.id && keyed) {
    const right = button("◎", `This should be the answer: ${name}`, () => onRight(hit.id));
    right.className = "teach";
    right.append(make("span", "", " Right answer"));
    actions.append(right);
  }
  const more = button("More", `More of ${name}`, () => more.setAttribute("aria-expanded", String(line.classList.toggle("whole"))));
  more.setAttribute("aria-expanded", "false");
  actions.append(more);
  middle.append(head);
  if (text) middle.append(make("p", "body", text));
  weight.append(make("b"), " ", make("small", "", !keyed ? "no key" : score === null ? "" : `score ${Number(score.toPrecision(3))}`));
  for (const [field, value] of fields) {
    const part = make("li");
    if (field) part.append(make("b", "", field), " ");
    part.append(value);
    parts.append(part);
  }
  if (hit.more) parts.append(make("li", "", `and ${count(hit.more)} more fields`));
  line.append(make("span", "rank", String(i + 1)), middle, actions, weight, bar(0), make("p", "why"), parts);
  return line;
}

function button(text, label, act) {
  const one = make("button", "", text);
  one.type = "button";
  one.setAttribute("aria-label", label);
  one.addEventListener("click", act);
  return one;
}

export function weigh(list, rest, soft) {
  const lines = [...list.children].filter((line) => line.dataset.id !== undefined);
  lines.forEach((line, i) => {
    const weight = soft ? soft.weights[i] : null;
    line.dataset.weight = weight ?? "";
    line.querySelector(".weight b").textContent = weight === null ? "" : share(weight);
    line.querySelector(".bar i").style.width = `${100 * (weight ?? 0)}%`;
    const score = line.querySelector(".weight small").textContent.replace("score ", "");
    line.querySelector(".why").textContent = weight === null || !Number(score) ? "" : `Weight ${share(weight)} = exp(${score} / ${short(soft.temperature)}), divided by the sum of the same for ${count(soft.candidates)} records.`;
  });
  rest.hidden = !soft || !lines.length;
  if (rest.hidden) return;
  const others = Math.max(0, (soft.exact || soft.bar !== null ? soft.of : soft.candidates) - lines.length);
  rest.replaceChildren(make("span", "", others ? `${count(others)} other records` : "no other record"), make("b", "", share(soft.rest)), bar(soft.rest));
}

// The answer in a sentence: its kind, and what it is a mean of.
export function verdict(soft, hits = []) {
  if (!soft) return ["No answer yet", "nothing here has a vector to weigh records by."];
  if (!soft.candidates) return ["No answer", "no record takes part."];
  const n = soft.exact ? soft.candidates : soft.of, e = soft.effective, best = soft.weights.indexOf(Math.max(...soft.weights));
  const name = hits[best] ? hits[best].title || hits[best].shown_id : "", led = name ? `, led by “${name}” with ${share(soft.weights[best])}` : "";
  const [label, sure] = soft.classes[0] ?? [];
  const says = label === undefined ? "" : ` It is class ${label} with ${share(sure)}.`;
  if (e < 1.5) return ["Look-up", `one record is the answer${name ? `, “${name}”` : ""}.${says}`];
  if (e > 0.8 * n) return ["Average", `a mean of all ${count(n)} records, whatever the question.${says}`];
  return ["Soft query", `a mean of about ${about(e)} of ${count(n)} records${led}.${says}`];
}

const facts = (list, pairs) => {
  list.replaceChildren(...pairs.filter(([, value]) => value !== null && value !== "").flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
  return list;
};
export { facts };

export function showSoft(place, soft) {
  if (!soft) {
    place.replaceChildren(make("p", "", "A soft query compares vectors, and nothing found here has one."));
    return;
  }
  const number = make("p", "effective", `${!soft.exact && soft.bar !== null ? "about " : ""}${about(soft.effective)}`);
  const what = make("p", "", "records, if they weighed alike: the effective number, 1 / Σ w²");
  const off = soft.exact ? "none: every record was weighed" : soft.bar !== null ? `± ${short(soft.bar)} in 95 of 100 answers` : "unknown";
  const list = facts(make("dl"), [
    ["Error", off],
    ["Tolerance", soft.exact || soft.bar === null ? null : soft.met ? "met" : "not met"],
    ["Weight missed", soft.exact || soft.bar !== null || soft.missed === null ? null : `about ${share(soft.missed)}`],
    ["Records weighed", count(soft.candidates)],
    ["Log-normaliser", soft.lse === null ? null : short(soft.lse)],
    ["Length of the answer", soft.classes.length ? null : short(soft.norm)],
    ["Answered in", `${short(soft.milliseconds)} ms`],
  ]);
  place.replaceChildren(number, what, list);
  if (soft.classes.length) {
    const classes = make("ul", "classes");
    for (const [label, weight] of soft.classes) {
      const line = make("li");
      line.append(make("span", "", `class ${label}`), bar(weight), make("span", "", share(weight)));
      classes.append(line);
    }
    place.append(classes);
  } else if (soft.output.length) {
    const more = soft.width > soft.output.length ? ", …" : "";
    place.append(make("pre", "", `[${soft.output.map((x) => x.toFixed(3)).join(", ")}${more}]`));
    place.lastChild.tabIndex = 0;
    place.lastChild.setAttribute("aria-label", "The first numbers of the answer");
  }
}
