// The page: what is asked, the newest question wins, and every answer is shown as text.

import { recalled, Trail } from "./address.js";
import { copies, sheets } from "./controls.js";
import { Filters } from "./filters.js";
import { Lesson } from "./gradient.js";
import { Sky } from "./map.js";
import { showPanels } from "./panels.js";
import { Channel, Problem } from "./requests.js";
import { count, make, share, short, showHits, showSoft, verdict, weigh } from "./results.js";
import { Sweep } from "./sweep.js";
import { kept, themed } from "./theme.js";
import { Training } from "./train.js";

const $ = (id) => document.getElementById(id);
const STEPS = 1000, PATIENCE = 250; // of the slider; milliseconds that a newer temperature waits for an older one
const state = { about: null, map: null, answer: null, soft: null, given: null, note: "", mapAsked: 0 };
const opened = location.hash; // the address holds the answered question later
const sky = new Sky($("map"), $("tip"), { visit, picked });
const lesson = new Lesson($, sky, () => ask("link")), training = new Training($, sky, () => ask("link"));
const filters = new Filters($, () => Boolean(state.about?.text_index), again);
const trail = new Trail();
const asking = new Channel(), weighing = new Channel(), comparing = new Channel(), mapping = new Channel(), completing = new Channel();

function tell(problem) {
  $("problem").hidden = !problem;
  $("problem").textContent = problem?.message ?? "";
  if (problem && !(problem instanceof Problem)) throw problem;
}

// The line below the box: what is missing, and words to click.
function hint(text, questions) {
  $("hint").textContent = text;
  $("chips").replaceChildren(...questions.map(([name, value, label]) => {
    const chip = make("button", "chip", label);
    chip.type = "button";
    if (name === kind() && value === box().value) chip.setAttribute("aria-current", "true");
    chip.addEventListener("click", () => {
      choose(name);
      $("asked").value = value;
      ask();
    });
    return chip;
  }));
}
const takesText = () => state.about.takes_text || Boolean(state.about.text_index);
const examples = () => hint(takesText() ? "Try" : "Text needs an encoder (--encoder MODEL) or an index of words (index_text). Try", state.about.examples);

// -- the temperature: the slider is logarithmic, the number beside it is what is asked

const logOf = (name) => Math.log(state.about.temperatures[name]);
const atStep = (step) => Number(Math.exp(logOf("low") + (step / STEPS) * (logOf("high") - logOf("low"))).toPrecision(3));
const stepOf = (t) => Math.round((STEPS * (Math.log(t) - logOf("low"))) / (logOf("high") - logOf("low")));
const temperature = () => Number($("exactly").value);

function heat(t) {
  $("exactly").value = String(t);
  $("temperature").value = String(Math.min(STEPS, Math.max(0, stepOf(t))));
}

function heated() {
  if (!(temperature() > 0)) return hint("A temperature is a number above 0.", []);
  if (state.answer) reweigh();
  else ask();
}

const sweep = new Sweep($("sweep"), (step) => {
  heat(step === null ? state.about.temperatures.start : atStep(step));
  heated();
}, () => stepOf(state.about.temperatures.start));

// -- asking

const kind = () => document.querySelector("input[name=kind]:checked").value;
const box = () => $(kind() === "vector" ? "numbers" : "asked");

function parameters() {
  const given = { [kind()]: box().value.trim(), shown: $("shown").value };
  if (filters.value) given.where = filters.value;
  if ($("ranking").value !== "vector") given.ranking = $("ranking").value;
  if ($("ranking").value !== "vector" && $("words").value.trim() && !$("words-option").hidden) given.words = $("words").value;
  return { ...given, ...lesson.settings(kind(), given[kind()]), ...training.settings(kind()), way: $("way").value, ...($("way").value === "nearest" ? { k: $("k").value } : $("way").value === "estimate" ? { rtol: $("rtol").value } : {}) };
}

// The settings that an address needs: those that are not the usual ones.
function linked(given, t) {
  const usual = { shown: "10", way: state.about.way };
  return { ...Object.fromEntries(Object.entries(given).filter(([name, value]) => usual[name] !== value)), temperature: t };
}

// Ask what stands in the box; `by`: "act", a click or a key that asks; "typed", while it is typed; "link", from the address.
async function ask(by = "act") {
  const given = parameters(), t = temperature(), text = given[kind()];
  if (!text) return old("");
  weighing.stop();
  try {
    const answer = await asking.get("ask", { ...given, temperature: t });
    if (!answer) return;
    tell(null);
    if (by === "typed" && !answer.hits.length && !given.where) return old(text);
    Object.assign(state, { answer, given, note: by === "link" ? state.note : "" });
    answered(answer, text);
    trail.add(linked(given, t), by);
    if (temperature() !== t) reweigh();
  } catch (error) {
    if (by === "typed" && error instanceof Problem) return old(text, error.message);
    if (by === "link" && error instanceof Problem && location.hash) {
      state.note = `${error.message} This is an example instead.`;
      return recall("");
    }
    tell(error);
  }
}

// What is typed has no answer: the last one stays, marked as such.
function old(text, message = "") {
  $("answer").classList.toggle("old", Boolean(text && state.answer));
  if (!text) return examples();
  const names = state.completions ?? [], known = state.about.known_words, begun = names[0]?.[0].startsWith(text.toLowerCase());
  if (kind() === "id") hint(names.length ? "Records:" : "Enter asks by this id.", names.slice(0, 4).map(([id, title]) => ["id", id, title || id]));
  else if (known) hint(begun ? "Known words:" : `“${text}” is not among the ${count(known)} known words${names.length ? ":" : ", and in no text."}`, names.slice(0, 6).map(([word]) => ["text", word, word]));
  else hint(message || `No text has “${text}”.`, []);
}

function answered(answer, text) {
  const title = kind() === "id" ? answer.hits.find((hit) => hit.id === text)?.title || text : text;
  const name = title.length > 40 ? `${title.slice(0, 39)}…` : title;
  document.title = `${name} · ${state.about.name} · softdb`;
  $("hits-title").textContent = answer.hits.length ? `Nearest to “${name}”` : "Nearest records";
  $("answer").classList.remove("old");
  showHits($("hits"), answer, visit, (id) => lesson.teach(id));
  $("spent").textContent = answer.hits.length ? `Found in ${short(answer.milliseconds)} ms.` : "";
  $("compared").textContent = "";
  const notes = [state.note, ...answer.notes].filter(Boolean);
  $("notes").hidden = !notes.length;
  $("notes").textContent = notes.join(" ");
  examples();
  shown(answer, true);
  const [what, more] = verdict(answer.soft, answer.hits);
  $("spoken").textContent = `${answer.hits.length} records. ${what}: ${more}`;
}

// While the slider moves one request is under way, and the newest temperature is next; one that lingers is cancelled.
async function reweigh() {
  if (weighing.busy >= 0 && weighing.busy < PATIENCE) return;
  const t = temperature(), { given } = state;
  try {
    const answer = await weighing.get("weigh", { ...given, temperature: t });
    if (!answer) return;
    tell(null);
    if (answer.generation !== state.answer.generation) return ask("link"); // someone wrote meanwhile
    shown(answer);
    trail.heat(linked(given, t));
    if (temperature() !== t) reweigh();
  } catch (error) {
    tell(error);
  }
}

function shown(answer, fresh = false) {
  const soft = (state.soft = answer.soft);
  weigh($("hits"), $("rest"), soft);
  showSoft($("soft"), soft);
  const [what, more] = verdict(soft, state.answer.hits);
  $("verdict").replaceChildren(make("b", "", what), `: ${more}`);
  $("temperature").setAttribute("aria-valuetext", `${temperature()}, ${what}: ${more}`);
  $("python").textContent = answer.python;
  $("legend-answer").hidden = !soft?.answer;
  for (const stop of document.querySelectorAll(".stops button")) stop.classList.toggle("on", stop.textContent === what);
  sky.show(state.map, state.answer, soft);
  lesson.follow(state.answer.at && state.given, temperature(), fresh);
  if (state.map?.generation !== answer.generation || answer.map !== state.map?.generation) redrawMap();
}

async function redrawMap() {
  if (state.map && performance.now() - state.mapAsked < 5000) return; // a busy writer does not keep the map from standing still
  state.mapAsked = performance.now();
  const map = await mapping.get("map", {}).catch(tell);
  if (!map) return;
  const first = !state.map;
  state.map = map;
  $("map-share").textContent = map.points.length ? `${map.points.length < map.of ? `${count(map.points.length)} of ${count(map.of)}` : count(map.of)} keys. ${map.dim <= 2 ? "A key is two numbers or fewer, so the map shows all of it." : map.share > 0.9995 ? "These two axes show all of the keys' variance." : `These two axes hold ${share(map.share)} of the keys' variance: what is near here may be far in the other ${count(map.dim - 2)}.`}` : "no keys yet";
  if (first) sky.show(map, state.answer, state.soft);
  else await introduce().then(() => ask("link"), tell);
}

function picked(record, text) {
  $("walked").textContent = record ? text : "Walk through the map by light.";
  $("walked").classList.toggle("long", Boolean(record));
  $("visit").disabled = $("teach").disabled = !record?.id;
}

async function colour() {
  const field = $("colour").value;
  try {
    const reply = field ? await new Channel(true).get("colours", { field }) : null;
    if (field !== $("colour").value) return;
    sky.colours.set(reply && reply.generation === state.map?.generation ? reply : null);
    sky.colours.legend($("colours"), sky.theme);
    sky.draw();
  } catch (error) {
    tell(error);
  }
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
  document.querySelector(`input[name=kind][value=${name}]`).checked = true;
  const text = name === "text";
  $("numbers").hidden = name !== "vector";
  $("asked").hidden = name === "vector";
  $("asked").placeholder = text ? `Type a ${state.about.known_words ? "word" : "text"}, and see what is near to it` : "The id of a record, such as one of the list";
  $("asked-label").textContent = text ? "Text to ask by" : "Id of the record to ask by";
  options();
}

function options() {
  $("ranking-option").hidden = !state.about.text_index;
  $("words-option").hidden = $("ranking").value === "vector" || !state.about.text_index;
  $("k-option").hidden = $("way").value !== "nearest";
  $("rtol-option").hidden = $("way").value !== "estimate";
  const changed = [filters.value && "a filter", $("way").value !== state.about.way && $("way").selectedOptions[0].text, $("ranking").value !== "vector" && $("ranking").selectedOptions[0].text];
  $("more-state").textContent = changed.filter(Boolean).join(", ");
}

// Ask with other options; where the box holds no answered question, the last one.
function again() {
  const last = ["text", "id", "vector"].find((name) => state.given?.[name]);
  if (last && ($("answer").classList.contains("old") || !box().value.trim())) {
    choose(last);
    box().value = state.given[last];
  }
  options();
  ask();
}

// Set the page as an address says, and ask.
function recall(hash) {
  const { about } = state, [first] = about.examples;
  const { given, wrong } = recalled(hash, (name, value) => name !== "way" && name !== "ranking" && name !== "shown" ? true : [...$(name).options].some((one) => one.value === value));
  if (wrong.length) state.note = `The address has ${wrong.join(", ")}, which this page does not know; the usual settings stand instead.`;
  const defaults = { ranking: "vector", words: "", shown: "10", way: about.way, k: "100", rtol: "0.05" };
  for (const [name, value] of Object.entries(defaults)) $(name).value = given[name] ?? value;
  filters.set(given.where ?? "", true);
  heat(Number(given.temperature ?? about.temperatures.start));
  const name = ["text", "id", "vector"].find((one) => given[one]) ?? first?.[0] ?? (takesText() ? "text" : "id");
  choose(name);
  box().value = given[name] ?? first?.[1] ?? "";
  lesson.recall(`${kind()} ${box().value.trim()}`, given);
  const trained = Number(given.trained ?? 0);
  if (trained === training.steps) return ask("link");
  return training.recall(trained, kind() === "text" ? box().value : "").then(() => ask("link"));
}

// -- the database

async function introduce() {
  const about = await new Channel().get("about", {});
  state.about = about;
  $("name").textContent = about.name;
  $("facts").textContent = `A vector database of ${count(about.records)} ${about.known_words ? "dictionary definitions" : "records"} · ${count(about.dim)} numbers a key · ${about.metric}`;
  $("version").textContent = `softdb ${about.version}`;
  document.querySelector("input[value=text]").disabled = !takesText();
  document.querySelector(".stops [data-stop=start]").style.left = `${Math.min(78, Math.max(22, stepOf(about.temperatures.start) / 10))}%`;
  filters.know(about.filters);
  showPanels($, about);
  training.know(about);
  const fields = about.filters.filter((one) => one.kinds.length && one.kinds.every((kind) => ["number", "text", "boolean"].includes(kind)) && one.repeated);
  $("colour-by").hidden = !fields.length;
  const was = $("colour").value;
  $("colour").replaceChildren(...["", ...fields.map((one) => one.name)].map((name) => Object.assign(make("option", "", name || "nothing"), { value: name })));
  $("colour").value = fields.some((one) => one.name === was) ? was : "";
  if (was) colour();
}

async function begin() {
  try {
    await introduce();
    await Promise.all([redrawMap(), recall(opened)]);
    if (!state.about.records) {
      showHits($("hits"), { hits: [], scores: [], places: [] }, visit);
      $("hits").firstChild.textContent = "This database holds no record yet. Insert some; this page sees them with the next question.";
    }
    if (state.soft && !opened && !kept("swept")) sweep.first();
  } catch (error) {
    tell(error);
  }
}

// -- wiring

$("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address holds settings after its #
  box().focus();
});
$("question").addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(typing);
  ask();
});
let typing = 0;
$("asked").addEventListener("focus", () => trail.begin());
$("asked").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(typed, 200);
});
async function typed() {
  const text = $("asked").value.trim();
  const reply = text ? await completing.get("complete", { kind: kind(), text }).catch(() => null) : null;
  if (text && !reply) return;
  state.completions = reply?.completions ?? [];
  $("completions").replaceChildren(...state.completions.map(([value, label]) => {
    const option = make("option");
    Object.assign(option, label ? { value, label } : { value });
    return option;
  }));
  const known = state.completions.some(([value]) => value === text), begun = kind() === "id" || (state.about.known_words && text.length === 1);
  if (begun && !known) old(text);
  else ask("typed");
}
$("numbers").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey) return;
  event.preventDefault();
  ask();
});
for (const radio of document.querySelectorAll("input[name=kind]")) {
  radio.addEventListener("change", () => {
    choose(radio.value);
    $("asked").value = radio.value === "id" ? state.answer?.hits[0]?.id ?? "" : "";
  });
}
for (const name of ["ranking", "way", "k", "rtol", "shown", "words"]) {
  $(name).addEventListener("change", again);
}
$("temperature").addEventListener("input", () => {
  $("exactly").value = String(atStep(Number($("temperature").value)));
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
    const { temperature: _, way: __, k: ___, rtol: ____, ...given } = state.given;
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
$("teach").addEventListener("click", () => sky.chosen && lesson.teach(sky.chosen.id));
$("zoom-in").addEventListener("click", () => sky.magnify(1.6));
$("zoom-out").addEventListener("click", () => sky.magnify(1 / 1.6));
$("zoom-fit").addEventListener("click", () => sky.fit());
$("colour").addEventListener("change", colour);
function walk(by) {
  if (sky.all.length) sky.step(by);
  else $("walked").textContent = "There is nothing on the map.";
}
copies($("copy"), () => $("python").textContent);
copies($("link"), () => trail.here());
sheets();
window.addEventListener("hashchange", () => recall(location.hash));
new ResizeObserver(([one]) => document.documentElement.style.setProperty("--heat", `${Math.round(one.borderBoxSize[0].blockSize)}px`)).observe(document.querySelector(".heat"));
themed($("theme"), (theme) => {
  sky.theme = theme;
  sky.colours.legend($("colours"), theme);
  lesson.render();
  training.render();
  sky.draw();
});
begin();
