// The page: what is asked, the newest question wins, and every answer is shown as text.

import { Filters } from "./filters.js";
import { Sky } from "./map.js";
import { showPanels } from "./panels.js";
import { count, make, share, short, showHits, showSoft, verdict, weigh } from "./results.js";

const $ = (id) => document.getElementById(id);
const STEPS = 1000, PATIENCE = 250; // of the slider; milliseconds that a newer temperature waits for an older one
const state = { about: null, map: null, answer: null, soft: null, question: null, mapAsked: 0 };
const sky = new Sky($("map"), $("tip"), visit);
const filters = new Filters($, () => Boolean(state.about?.text_index), ask);

let pending = 0;
function busy(by) {
  pending += by;
  $("answer").setAttribute("aria-busy", String(pending > 0));
}

// One kind of request: a newer one cancels the one before, here and on the server.
class Channel {
  async get(call, parameters) {
    this.controller?.abort();
    const mine = (this.controller = new AbortController());
    this.since = performance.now();
    busy(1);
    try {
      const response = await fetch(`/api/${call}?${new URLSearchParams(parameters)}`, { signal: mine.signal });
      if (response.status >= 400 && !response.headers.get("content-type")?.includes("json")) throw new Problem("TooLong", "The question is longer than this server takes.");
      const answer = await response.json();
      if (answer.error) throw new Problem(answer.error.type, answer.error.message);
      return answer;
    } catch (error) {
      if (error.name === "AbortError" || mine !== this.controller) return null;
      throw error instanceof Problem ? error : new Problem("NoAnswer", "The server does not answer. Has it ended? Start softdb explore again.");
    } finally {
      if (mine === this.controller) this.controller = null;
      busy(-1);
    }
  }

  get busy() {
    return this.controller ? performance.now() - this.since : -1;
  }

  stop() {
    this.controller?.abort();
    this.controller = null;
  }
}
class Problem extends Error {
  constructor(type, message) {
    super(message);
    this.type = type;
  }
}
const asking = new Channel(), weighing = new Channel(), comparing = new Channel(), mapping = new Channel();

function tell(problem) {
  $("problem").hidden = !problem;
  $("problem").replaceChildren(...(problem ? [make("b", "", problem.type), problem.message] : []));
  if (problem && !(problem instanceof Problem)) throw problem;
}

// -- the temperature: the slider is logarithmic, the number beside it is what is asked

const logOf = (name) => Math.log(state.about.temperatures[name]);
const atStep = (step) => Math.exp(logOf("low") + (step / STEPS) * (logOf("high") - logOf("low")));
const stepOf = (t) => Math.round((STEPS * (Math.log(t) - logOf("low"))) / (logOf("high") - logOf("low")));
const temperature = () => Number($("exactly").value);

function heat(t) {
  $("exactly").value = String(t);
  $("temperature").value = String(Math.min(STEPS, Math.max(0, stepOf(t))));
}

function heated() {
  if (!(temperature() > 0)) return tell(new Problem("Temperature", "Give a temperature above 0."));
  if (state.answer && state.question === written()) reweigh();
  else ask();
}

// -- asking

const kind = () => document.querySelector("input[name=kind]:checked").value;

function parameters() {
  const given = { [kind()]: kind() === "vector" ? $("numbers").value : $("asked").value, shown: $("shown").value };
  if (filters.value) given.where = filters.value;
  if ($("ranking").value !== "vector") given.ranking = $("ranking").value;
  if ($("ranking").value !== "vector" && $("words").value.trim() && !$("words-option").hidden) given.words = $("words").value;
  return given;
}
const way = () => ({ way: $("way").value, ...($("way").value === "nearest" ? { k: $("k").value } : $("way").value === "estimate" ? { rtol: $("rtol").value } : {}) });
const written = () => JSON.stringify([parameters(), way()]);

async function ask() {
  weighing.stop();
  const given = parameters(), question = written(), t = temperature();
  if (!given[kind()].trim()) return;
  try {
    const answer = await asking.get("ask", { ...given, ...way(), temperature: t });
    if (!answer) return;
    tell(null);
    Object.assign(state, { answer, question });
    showHits($("hits"), answer, visit);
    $("spent").textContent = `found in ${short(answer.milliseconds)} ms`;
    $("compared").textContent = "";
    $("notes").hidden = !answer.notes.length;
    $("notes").textContent = answer.notes.join(" ");
    shown(answer);
    remember();
    const [what, more] = verdict(answer.soft);
    $("spoken").textContent = `${answer.hits.length} records. ${what}: ${more}`;
    if (temperature() !== t) reweigh();
  } catch (error) {
    tell(error);
  }
}

// While the slider moves one request is under way, and the newest temperature is next; one that lingers is cancelled.
async function reweigh() {
  if (weighing.busy >= 0 && weighing.busy < PATIENCE) return;
  const t = temperature();
  try {
    const answer = await weighing.get("weigh", { ...parameters(), ...way(), temperature: t });
    if (!answer) return;
    tell(null);
    if (answer.generation !== state.answer.generation) return ask(); // someone wrote meanwhile
    shown(answer);
    remember();
    if (temperature() !== t) reweigh();
  } catch (error) {
    tell(error);
  }
}

function shown(answer) {
  const soft = (state.soft = answer.soft);
  weigh($("hits"), $("strip"), $("rest"), soft);
  showSoft($("soft"), soft);
  const [what, more] = verdict(soft);
  $("verdict").replaceChildren(make("b", "", what), what && more ? `: ${more}` : more);
  $("temperature").setAttribute("aria-valuetext", `${temperature()}, ${what}, ${more}`);
  $("python").textContent = answer.python;
  $("legend-answer").hidden = !soft?.answer;
  for (const stop of document.querySelectorAll(".stops button")) stop.classList.toggle("on", state.about.temperatures[stop.dataset.stop] === temperature());
  sky.show(state.map, state.answer, soft);
  if (state.map?.generation !== answer.generation || answer.map !== state.map?.generation) redrawMap();
}

async function redrawMap() {
  if (state.map && performance.now() - state.mapAsked < 5000) return; // a busy writer does not keep the map from standing still
  state.mapAsked = performance.now();
  const map = await mapping.get("map", {}).catch(tell);
  if (!map) return;
  const first = !state.map;
  state.map = map;
  $("map-share").textContent = map.points.length ? `${map.points.length < map.of ? `${count(map.points.length)} of ${count(map.of)}` : count(map.of)} keys. The two axes carry ${share(map.share)} of the variance, so what is near here need not be near.` : "no keys yet";
  if (first) sky.show(map, state.answer, state.soft);
  else await introduce().then(ask, tell);
}

function visit(id) {
  choose("id");
  if ($("ranking").value !== "vector" && !$("words").value.trim()) $("ranking").value = "vector"; // a record says no words
  options();
  $("asked").value = id;
  $("asked").focus({ preventScroll: true });
  window.scrollTo({ top: 0 });
  ask();
}

function choose(name) {
  const radio = document.querySelector(`input[name=kind][value=${name}]`);
  radio.checked = true;
  const numbers = name === "vector", text = name === "text";
  $("numbers").hidden = !numbers;
  $("asked").hidden = numbers;
  $("asked").placeholder = text ? "Type a text, and see what is near to it" : "The id of a record, such as one of the list";
  $("asked-label").textContent = text ? "Text to ask by" : "Id of the record to ask by";
  if (name === "id") $("asked").setAttribute("list", "examples");
  else $("asked").removeAttribute("list");
  if (text && !state.about.takes_text) $("ranking").value = "text"; // words are all that this database takes
  options();
}

function options() {
  $("ranking-option").hidden = !state.about.text_index;
  $("words-option").hidden = $("ranking").value === "vector" || !state.about.text_index;
  $("k-option").hidden = $("way").value !== "nearest";
  $("rtol-option").hidden = $("way").value !== "estimate";
}

// -- what stands in the address after #, so that a page can be loaded again, or marked

let remembering = 0;
function remember() {
  clearTimeout(remembering); // a slider that moves would be more than browsers allow
  remembering = setTimeout(() => {
    const given = { ...parameters(), ...way(), temperature: temperature() };
    history.replaceState(null, "", `#${new URLSearchParams(given)}`);
  }, 400);
}

function recall() {
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const { about } = state, [example] = about.examples;
  const name = ["text", "id", "vector"].find((one) => given[one]) ?? (about.first ? "text" : "id");
  for (const one of ["ranking", "words", "shown", "way", "k", "rtol"]) if (given[one]) $(one).value = given[one];
  if (!given.way) $("way").value = about.way;
  if (!$("shown").value) $("shown").value = "10";
  filters.set(given.where ?? "", true);
  heat(Number(given.temperature) > 0 ? Number(given.temperature) : about.temperatures.start);
  (name === "vector" ? $("numbers") : $("asked")).value = given[name] ?? about.first ?? example?.[0] ?? "";
  choose(name);
}

// -- the database

async function introduce() {
  const about = await new Channel().get("about", {});
  state.about = about;
  document.title = `${about.name} · softdb explore`;
  $("name").textContent = about.name;
  $("facts").textContent = `${count(about.records)} records · ${count(about.dim)} numbers a key · ${about.metric}${about.encoder ? ` · ${about.encoder}` : ""}`;
  $("version").textContent = `softdb ${about.version}`;
  const options = about.examples.map(([id, title]) => {
    const option = make("option");
    option.value = id;
    option.label = title;
    return option;
  });
  $("examples").replaceChildren(...options);
  document.querySelector("input[value=text]").disabled = !about.takes_text && !about.text_index;
  document.querySelector(".stops [data-stop=start]").style.left = `${stepOf(about.temperatures.start) / 10}%`;
  filters.know(about.filters);
  showPanels($, about);
}

async function begin() {
  try {
    await introduce();
    recall();
    await Promise.all([redrawMap(), ask()]);
    if (!state.about.records) showHits($("hits"), { hits: [], scores: [], places: [] }, visit);
    if (!state.about.records) $("hits").firstChild.textContent = "This database holds no record yet. Insert some; this page sees them with the next question.";
  } catch (error) {
    tell(error);
  }
}

// -- wiring

$("question").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
let typing = 0;
$("asked").addEventListener("input", () => {
  clearTimeout(typing);
  if (kind() === "text" || state.about?.examples.some(([id]) => id === $("asked").value)) typing = setTimeout(ask, 250);
});
$("numbers").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey) return;
  event.preventDefault();
  ask();
});
for (const radio of document.querySelectorAll("input[name=kind]")) {
  radio.addEventListener("change", () => {
    choose(radio.value);
    if (radio.value === "id" && !state.about.examples.some(([id]) => id === $("asked").value)) $("asked").value = state.answer?.hits[0]?.id ?? "";
  });
}
for (const name of ["ranking", "way", "k", "rtol", "shown", "words"]) {
  $(name).addEventListener("change", () => {
    options();
    ask();
  });
}
$("temperature").addEventListener("input", () => {
  $("exactly").value = String(Number(atStep(Number($("temperature").value)).toPrecision(3)));
  heated();
});
$("exactly").addEventListener("change", () => {
  heat(temperature());
  heated();
});
for (const stop of document.querySelectorAll("[data-stop]")) {
  stop.addEventListener("click", () => {
    heat(state.about.temperatures[stop.dataset.stop]);
    heated();
  });
}
$("compare").addEventListener("click", async () => {
  $("compared").textContent = "Comparing every record …";
  try {
    const { temperature: _, ...given } = parameters();
    const found = await comparing.get("compare", given);
    if (!found) return;
    const missed = found.missed.length ? ` Missed: ${found.missed.join(", ")}.` : "";
    $("compared").textContent = `${share(found.recall)} of the ${count(found.of)} nearest were found, in ${short(found.indexed)} ms against ${short(found.milliseconds)} ms exactly.${missed}`;
  } catch (error) {
    $("compared").textContent = error.message;
  }
});
$("brighter").addEventListener("click", () => walk(-1));
$("dimmer").addEventListener("click", () => walk(1));
$("visit").addEventListener("click", () => sky.chosen && visit(sky.chosen.id));
function walk(by) {
  $("walked").textContent = sky.step(by);
  $("visit").disabled = !sky.chosen?.id;
}
$("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText($("python").textContent).then(() => ($("copy").textContent = "Copied"), () => ($("copy").textContent = "Not allowed"));
  setTimeout(() => ($("copy").textContent = "Copy"), 1500);
});

const kept = (name, value) => {
  try {
    if (value !== undefined) localStorage.setItem(`softdb-${name}`, value);
    return localStorage.getItem(`softdb-${name}`);
  } catch {
    return null; // a browser that keeps nothing
  }
};
const dark = matchMedia("(prefers-color-scheme: dark)");
function paint() {
  const theme = kept("theme") ?? "system";
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  sky.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  sky.draw();
}
dark.addEventListener("change", paint);
$("theme").addEventListener("click", () => {
  const themes = ["system", "light", "dark"];
  kept("theme", themes[(themes.indexOf(kept("theme") ?? "system") + 1) % 3]);
  paint();
});
function teach(open) {
  $("lesson").hidden = !open;
  $("help").setAttribute("aria-expanded", String(open));
  kept("lesson", open ? "open" : "closed");
}
$("help").addEventListener("click", () => teach($("lesson").hidden));
$("lesson-close").addEventListener("click", () => {
  teach(false);
  $("help").focus();
});
teach(kept("lesson") !== "closed");
paint();
begin();
