// What an answer shows: the records and their weights, the soft answer, numbers as people read them.

export const make = (tag, name = "", text = null) => {
  const one = document.createElement(tag);
  if (name) one.className = name;
  if (text !== null) one.textContent = text; // text, whatever is stored: never markup
  return one;
};

const counts = new Intl.NumberFormat("en");
export const count = (n) => counts.format(n);
export const about = (x) => (x >= 100 ? count(Math.round(x)) : x >= 10 ? x.toFixed(1) : x.toFixed(2));
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
export function showHits(list, answer, onVisit) {
  list.replaceChildren(...answer.hits.map((hit, i) => hitLine(hit, answer.scores[i], answer.places[i] !== null, i, onVisit)));
  if (!answer.hits.length) list.append(make("li", "empty", "No record matches. Loosen the filter, or ask otherwise."));
}

function hitLine(hit, score, keyed, i, onVisit) {
  const line = make("li"), middle = make("div"), weight = make("div", "weight"), parts = make("ul", "parts");
  line.dataset.id = hit.id;
  middle.append(make("span", "name", hit.title || hit.shown_id), make("span", "own-id", hit.title ? hit.shown_id : ""));
  if (hit.text !== null && hit.text !== hit.title) middle.append(make("p", "body", hit.text));
  weight.append(make("b"), make("small", "", !keyed ? "no key" : score === null ? "" : `score ${short(score)}`));
  for (const [name, value] of hit.payload) {
    if (value === hit.title) continue;
    const part = make("li");
    if (name) part.append(make("b", "", name));
    part.append(value);
    parts.append(part);
  }
  if (hit.more) parts.append(make("li", "", `and ${count(hit.more)} more fields`));
  if (hit.id && keyed) parts.append(button("Ask by this", `Ask by ${hit.title || hit.shown_id}`, () => onVisit(hit.id)));
  if ((hit.text ?? "").length > 220) parts.append(button("Whole text", "Show the whole text", () => line.classList.toggle("whole")));
  line.append(make("span", "rank", String(i + 1)), middle, weight, bar(0), parts);
  return line;
}

function button(text, label, act) {
  const item = make("li"), one = make("button", "", text);
  one.type = "button";
  one.setAttribute("aria-label", label);
  one.addEventListener("click", act);
  item.append(one);
  return item;
}

export function weigh(list, strip, rest, soft) {
  const lines = [...list.children].filter((line) => line.dataset.id !== undefined);
  lines.forEach((line, i) => {
    const weight = soft ? soft.weights[i] : null;
    line.dataset.weight = weight ?? "";
    line.querySelector(".weight b").textContent = weight === null ? "" : share(weight);
    line.querySelector(".bar i").style.width = `${100 * (weight ?? 0)}%`;
  });
  strip.hidden = rest.hidden = !soft || !lines.length;
  if (strip.hidden) return;
  strip.replaceChildren(...soft.weights.map((w) => {
    const part = make("i");
    part.style.width = `${100 * w}%`;
    return part;
  }));
  const others = Math.max(0, (soft.exact || soft.bar !== null ? soft.of : soft.candidates) - lines.length);
  const said = `${share(soft.rest)} of the weight is with ${others ? `the ${count(others)} others that take part at most` : "no other"}`;
  rest.textContent = `${share(soft.rest)} of all weight lies with records that are not in this list.`;
  strip.setAttribute("aria-label", `Of the weight ${share(1 - soft.rest)} is with the ${lines.length} records of the list; ${said}`);
}

export function verdict(soft) {
  if (!soft) return ["", "Words alone have no vector, so there are no weights. Ask by one of the records found."];
  if (!soft.candidates) return ["nothing", "No record takes part, so there is no answer."];
  const n = soft.exact ? soft.candidates : soft.of, e = soft.effective;
  if (e < 1.5) return ["a look-up", "one record is the answer"];
  if (e > 0.8 * n) return ["average pooling", `all ${count(n)} records count nearly alike`];
  return ["a soft query", `a mean of about ${about(e)} of ${count(n)} records`];
}

const facts = (list, pairs) => {
  list.replaceChildren(...pairs.filter(([, value]) => value !== null && value !== "").flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
  return list;
};
export { facts };

export function showSoft(place, soft) {
  if (!soft) {
    place.replaceChildren(make("p", "", "A soft query compares vectors. Ask by a record or a vector, or where the database has an encoder by a text."));
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
