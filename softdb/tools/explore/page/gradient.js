// A lesson: the reader says which record should be the answer, and the gradient of the loss moves the question.

import { enlarged, follows } from "./arrows.js";
import { THEMES } from "./map.js";
import { Channel, Problem } from "./requests.js";
import { make, share, short } from "./results.js";

const MOST = 40, REST = 90; // steps; milliseconds after which a slider that moves has stopped

export class Lesson {
  constructor($, sky, ask) {
    Object.assign(this, { $, sky, ask, right: null, of: "", moves: [], path: [], losses: [], sloping: new Channel(), trailing: new Channel() });
    $("step").addEventListener("click", () => this.step());
    $("undo").addEventListener("click", () => this.undo());
    $("to-train").addEventListener("click", () => $("train").scrollIntoView({ behavior: "smooth", block: "center" }));
    $("done").addEventListener("click", () => this.end());
  }

  // The part of a question that the lesson adds; the moves belong to one question alone.
  settings(kind, text) {
    if (this.of !== `${kind} ${text}`) this.begin(`${kind} ${text}`);
    return { ...(this.right ? { right: this.right } : {}), ...(this.moves.length ? { moves: JSON.stringify(this.moves) } : {}) };
  }

  begin(of, right = null, moves = []) {
    Object.assign(this, { of, right, moves, path: [], losses: [], reply: null });
    this.render();
  }

  // From an address.
  recall(of, { right, moves }) {
    let given = [];
    try {
      given = JSON.parse(moves ?? "[]");
    } catch { /* an address that is no list has no moves */ }
    this.begin(of, right ?? null, Array.isArray(given) ? given.slice(0, MOST) : []);
  }

  teach(id) {
    Object.assign(this, { right: id, moves: [], path: [], losses: [] });
    this.asks = true;
    this.ask();
  }

  step() {
    if (!this.reply || this.moves.length >= MOST) return;
    const n = this.moves.length;
    this.path[n] = this.sky.answer.at;
    this.moves = [...this.moves, [this.right, this.t]];
    this.ask();
  }

  undo() {
    this.moves = this.moves.slice(0, -1);
    this.ask();
  }

  end() {
    Object.assign(this, { right: null, moves: [], path: [], losses: [] });
    this.ask();
    this.$("lesson-title").focus();
  }

  // A new answer, or the same at another temperature: after a rest fetch its trail and its gradient.
  follow(given, t, fresh) {
    clearTimeout(this.timer);
    if (!given) return;
    this.timer = setTimeout(() => this.fetch(given, t, fresh), fresh ? 0 : REST);
  }

  async fetch(given, t) {
    const { right, ...question } = given, key = JSON.stringify([question, this.sky.answer?.generation]);
    try {
      if (right) {
        const reply = await this.sloping.get("gradient", { ...given, temperature: t });
        if (reply && given.right === this.right) this.learn(reply, t);
      } else this.learn(null, t);
      if (key !== this.trailOf) {
        const reply = await this.trailing.get("trail", question);
        if (!reply) return;
        this.trailOf = key;
        this.sky.trail = reply.trail;
        this.$("legend-trail").hidden = !reply.trail.length;
        this.sky.draw();
      }
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      this.learn(null, t);
      this.$("lesson-lead").textContent = error.message;
    }
  }

  learn(reply, t) {
    const n = this.moves.length;
    Object.assign(this, { reply, t });
    this.losses.length = Math.min(this.losses.length, n);
    this.path.length = Math.min(this.path.length, n);
    if (reply) this.losses[n] = reply.loss;
    if (reply && this.asks && this.sky.answer?.at) this.sky.focus([this.sky.answer.at, reply.place, this.sky.soft?.answer ?? reply.place]);
    this.sky.lesson = reply && { ...reply, path: this.path.filter(Boolean) };
    this.sky.draw();
    this.render();
    if (reply && this.asks) this.bring();
    this.asks &&= !reply;
  }

  // The map, should the reader have scrolled it away.
  bring() {
    const { canvas } = this.sky, { top, bottom } = canvas.getBoundingClientRect();
    if (top < 0 || bottom > window.innerHeight) canvas.scrollIntoView({ block: "start" });
  }

  render() {
    const { $, reply } = this, on = Boolean(reply), n = this.moves.length;
    $("lesson-panel").hidden = $("legend-lesson").hidden = !on;
    $("lesson-lead").hidden = on;
    $("legend-map").hidden = on;
    $("undo").disabled = !n;
    $("to-train").hidden = !n || $("train").hidden;
    $("step").disabled = n >= MOST;
    for (const line of document.querySelectorAll("#hits > li")) line.classList.toggle("right", on && line.dataset.id === reply.right);
    if (!on) {
      $("lesson-lead").replaceChildren(make("b", "", "What is a gradient for?"), " Press ", make("span", "mark", "◎ Right answer"), " on the record that should win, and see how the question has to change.");
      return;
    }
    const place = [...document.querySelectorAll("#hits > li")].findIndex((line) => line.dataset.id === reply.right) + 1;
    this.places ??= {};
    const where = place ? `place ${place}` : `below place ${document.querySelectorAll("#hits > li").length}`;
    if (!n) this.first = where;
    const part = Math.exp(-reply.loss), weight = part < 1e-5 ? part.toExponential(1) : share(part).replace(" ", "\u00a0");
    $("lesson-says").replaceChildren(make("b", "right", reply.title || reply.right), ` should be the answer but has ${weight} of it: loss = −log ${weight} = `, make("b", "", reply.loss.toFixed(2)), n && this.first && this.first !== where ? `; ${this.first} → ` : "; ", make("b", "", where), ".");
    const move = follows(reply), ratio = move ? Math.hypot(...move) / (Math.hypot(...reply.step) || 1) : 1;
    const still = ratio < 0.02 ? " Here the answer hardly follows (a look-up has almost no gradient): warm it up." : "";
    $("lesson-why").textContent = `The gradient says how to change the question so that the loss falls: the right record pulls, every other pushes by its share.${still}`;
    const factor = enlarged(this.sky);
    $("lesson-more").textContent = `Gradient: ${reply.gradient.length} numbers, length ${short(reply.length)}, by autograd: retrieval_loss(db, question, right).backward(). A step is −${short(reply.rate)} times it${factor > 1.05 ? `, its arrow enlarged ${factor.toFixed(1)} times` : ""}.`;
    this.bars(reply.gradient);
    this.curve();
    $("lesson-spoken").textContent = `Loss ${reply.loss.toFixed(2)} after ${n} steps; ${reply.title || reply.right} is at ${where}, with ${weight} of the answer.`;
  }

  // Every number of the gradient, up or down.
  bars(numbers) {
    const canvas = this.$("numbers-of"), pen = penOf(canvas), { clientWidth: width, clientHeight: height } = canvas, most = Math.max(...numbers.map(Math.abs), 1e-300), wide = width / numbers.length;
    const colours = THEMES[this.sky.theme];
    numbers.forEach((x, i) => {
      pen.fillStyle = colours[x < 0 ? "pull" : "push"]; // the question moves against its gradient
      const tall = (Math.abs(x) / most) * (height / 2 - 1);
      pen.fillRect(i * wide, x < 0 ? height / 2 - tall : height / 2, Math.max(0.7, wide - 1), Math.max(0.5, tall));
    });
  }

  curve() {
    this.$("lesson-curve").hidden = this.losses.length < 2;
    drawCurve(this.$("lesson-curve"), [{ values: this.losses, colour: THEMES[this.sky.theme].line, dots: true }]);
    this.$("lesson-steps").textContent = this.losses.length > 1 && this.losses[0] !== undefined ? `${this.losses[0].toFixed(2)} → ${this.losses.at(-1).toFixed(2)}` : "";
  }
}

export function penOf(canvas) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(canvas.clientWidth * ratio);
  canvas.height = Math.round(canvas.clientHeight * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  return pen;
}

// Lines of numbers, from 0 or their least to their most.
export function drawCurve(canvas, lines) {
  const pen = penOf(canvas), { clientWidth: width, clientHeight: height } = canvas;
  for (const { values, colour, dots, opacity = 1 } of lines) {
    const known = values.map((y, x) => [x, y]).filter(([, y]) => Number.isFinite(y));
    if (!known.length) continue;
    const ys = lines.flatMap((line) => line.values).filter(Number.isFinite), low = Math.min(...ys), high = Math.max(...ys), last = Math.max(1, values.length - 1);
    const at = ([x, y]) => [4 + (x / last) * (width - 8), height - 4 - ((y - low) / (high - low || 1)) * (height - 8)];
    pen.strokeStyle = pen.fillStyle = colour;
    pen.globalAlpha = opacity;
    pen.lineWidth = 2;
    pen.beginPath();
    for (const one of known) pen.lineTo(...at(one));
    pen.stroke();
    for (const one of dots ? known : known.slice(-1)) {
      pen.beginPath();
      pen.arc(...at(one), 2.5, 0, 7);
      pen.fill();
    }
  }
}
