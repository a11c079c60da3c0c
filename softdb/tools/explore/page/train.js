// Training, live: each request is a number of steps, and the server's run is a function of that number.

import { drawCurve } from "./gradient.js";
import { THEMES } from "./map.js";
import { Channel, Problem } from "./requests.js";
import { count, make } from "./results.js";

const BURST = 20, SMOOTH = 0.85; // steps of one press; share of the old mean in the curve
const percent = (x) => `${(100 * x).toFixed(1)} %`;

export class Training {
  constructor($, sky, ask) {
    Object.assign(this, { $, sky, ask, steps: 0, marks: [], channel: new Channel(true), running: false });
    $("train-run").addEventListener("click", () => (this.running ? this.stop() : this.run(this.steps + BURST)));
    $("train-undo").addEventListener("click", () => this.go(this.marks.pop() ?? 0));
    $("train-reset").addEventListener("click", () => {
      this.marks = [];
      this.go(0);
    });
    window.addEventListener("pagehide", () => this.stop());
  }

  know(about) {
    this.$("train").hidden = !about.trainable;
    this.possible = about.trainable;
  }

  settings(kind) {
    return this.steps && this.possible && kind === "text" ? { trained: this.steps } : {};
  }

  // From an address: the run may have to catch up before the question can be asked.
  async recall(steps, text) {
    this.marks = [];
    this.steps = 0;
    if (this.possible && steps > 0) await this.reach(steps, text, false);
    this.render();
  }

  stop() {
    this.running = false;
    this.channel.stop();
  }

  async go(steps) {
    this.stop();
    this.steps = steps;
    this.ask();
    await this.reach(steps, this.text(), true);
  }

  async run(target) {
    this.marks.push(this.steps);
    this.running = true;
    this.render();
    const reached = await this.reach(target, this.text(), true);
    this.running = false;
    if (!reached && this.marks.at(-1) === this.steps) this.marks.pop();
    this.render();
  }

  text() {
    return document.querySelector("input[name=kind]:checked").value === "text" ? this.$("asked").value : "";
  }

  // Train to a number of steps, some at a time, and ask again after each; the end is measured on held-out words.
  async reach(target, text, shows) {
    try {
      for (;;) {
        const next = shows ? Math.min(target, this.steps + 2) : target;
        const reply = await this.channel.get("train", { steps: next, ...(text ? { text } : {}) });
        if (!reply) return false;
        target = Math.min(target, reply.most);
        this.reply = { ...reply, recalls: null };
        this.steps = reply.steps;
        this.render();
        if (shows) this.ask();
        if (reply.steps >= target) break;
      }
      const reply = await this.channel.get("train", { steps: target, measure: 1, ...(text ? { text } : {}) });
      if (reply) this.reply = reply;
      this.render();
      return Boolean(reply);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      this.$("train-says").textContent = error.message;
      return false;
    }
  }

  render() {
    const { $, reply, steps } = this;
    $("train-run").textContent = this.running ? "■ Stop" : steps ? `▶ ${BURST} more steps` : `▶ Train ${BURST} steps`;
    $("train-run").disabled = Boolean(reply && steps >= reply.most);
    $("train-undo").disabled = $("train-reset").disabled = !steps;
    $("train-step").textContent = steps ? `${count(steps)} steps` : "not trained";
    $("train-facts").hidden = !reply || !steps;
    if ($("train-facts").hidden) return drawCurve($("train-curve"), []);
    const colours = THEMES[this.sky.theme];
    let mean = reply.losses[0];
    const smooth = reply.losses.map((loss) => (mean = SMOOTH * mean + (1 - SMOOTH) * loss));
    drawCurve($("train-curve"), [{ values: reply.losses, colour: colours.ink, opacity: 0.3 }, { values: smooth, colour: colours.line }]);
    $("train-curve").setAttribute("aria-label", `Loss of ${steps} steps, smoothed: from ${smooth[0]?.toFixed(2)} to ${smooth.at(-1)?.toFixed(2)}`);
    const { place, recalls, words } = reply, at = (n) => (n ? `place ${n}` : "below place 100"), lines = [];
    const change = (name, before, now, better) => {
      const line = make("tr");
      line.append(make("th", "", name), make("td", "", before), make("td", better ? "better" : "", now));
      line.firstChild.scope = "row";
      lines.push(line);
    };
    if (place) change(`“${place.word}” finds its definition at`, at(place.before), at(place.now), place.now && (!place.before || place.now < place.before));
    const [before, now] = recalls ?? [null, null], waits = "measuring …";
    change(`first, of ${count(words[1])} held-out words`, before ? percent(before[0]) : waits, now ? percent(now[0]) : waits, now && now[0] > before[0]);
    change("among the first ten", before ? percent(before[1]) : waits, now ? percent(now[1]) : waits, now && now[1] > before[1]);
    $("train-rows").replaceChildren(...lines);
    if (recalls) $("train-spoken").textContent = `After ${steps} steps ${percent(now[0])} of held-out words are found first, before ${percent(before[0])}.`;
  }
}
