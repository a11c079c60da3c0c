// The map: a sample of the keys on a plane. A record's light is its share of the answer, so all light together is one.

import { Colours, PALE } from "./colours.js";
import { drawLesson } from "./arrows.js";
import { share, short } from "./results.js";

export const THEMES = {
  dark: { dot: "150, 160, 195", glow: "255, 178, 62", core: "#ffe2ae", query: "#7cc4ff", answer: "#ff8a9b", pull: "#5fdca9", push: "#b9a3ff", line: "#ffc163", ink: "#ebe8e1", paper: "#0f1118", half: 0.3, blend: "lighter", trail: ["#4f8fe0", "#a58fd0", "#f4a62a", "#ffe3ad"] },
  light: { dot: "120, 110, 90", glow: "224, 142, 11", core: "#a65c00", query: "#14619f", answer: "#b3264a", pull: "#0a7a55", push: "#6a4bc4", line: "#8a5200", ink: "#1f1c16", paper: "#f8f5ee", half: 0.5, blend: "source-over", trail: ["#2a66bd", "#7a5fb0", "#c77700", "#8a5200"] },
};
const GLIDE = 350, LEAST = 0.6, MOST = 60; // milliseconds of a moving question; range of the zoom
const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export class Sky {
  constructor(canvas, tip, { visit, picked }) {
    Object.assign(this, { canvas, tip, picked, map: null, answer: null, soft: null, trail: [], lesson: null, theme: "dark", chosen: null, hovered: null, all: [], zoom: 1, shift: [0, 0], at: null });
    this.colours = new Colours();
    new ResizeObserver(() => this.draw()).observe(canvas);
    const held = new Map();
    let moved = 0;
    const here = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    canvas.addEventListener("pointerdown", (event) => { held.set(event.pointerId, here(event)); moved = 0; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => {
      const now = here(event), before = held.get(event.pointerId);
      if (!before) return this.hover(this.nearest(now));
      const [other] = [...held].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
      moved += Math.hypot(now[0] - before[0], now[1] - before[1]);
      if (other) this.magnify(Math.hypot(now[0] - other[0], now[1] - other[1]) / Math.max(1, Math.hypot(before[0] - other[0], before[1] - other[1])), [(now[0] + other[0]) / 2, (now[1] + other[1]) / 2]);
      else if (moved > 4) this.pan(now[0] - before[0], now[1] - before[1]);
      held.set(event.pointerId, now);
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => {
      if (name === "pointerup" && moved <= 4 && held.size === 1) this.choose(this.nearest(here(event)));
      held.delete(event.pointerId);
    });
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("dblclick", () => this.chosen?.id && visit(this.chosen.id));
    canvas.addEventListener("wheel", (event) => {
      if (event.deltaY > 0 && this.zoom <= LEAST) return; // the whole map is in view, so the page scrolls on
      event.preventDefault();
      this.magnify(Math.exp(-Math.sign(event.deltaY) * Math.min(60, Math.abs(event.deltaY)) / 250), here(event));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const act = { "+": () => this.magnify(1.4), "=": () => this.magnify(1.4), "-": () => this.magnify(1 / 1.4), 0: () => this.fit(), ArrowLeft: () => this.pan(50, 0), ArrowRight: () => this.pan(-50, 0), ArrowUp: () => this.pan(0, 50), ArrowDown: () => this.pan(0, -50) }[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
  }

  magnify(factor, [px, py] = [this.canvas.clientWidth / 2, this.canvas.clientHeight / 2]) {
    const zoom = Math.min(MOST, Math.max(LEAST, this.zoom * factor)), by = zoom / this.zoom;
    const cx = this.canvas.clientWidth / 2, cy = this.canvas.clientHeight / 2, [x, y] = this.shift;
    this.shift = [(px - cx) * (1 - by) + x * by, (py - cy) * (1 - by) + y * by];
    this.zoom = zoom;
    this.pan(0, 0);
  }

  pan(dx, dy) {
    const limit = (size, x) => Math.max(-size * this.zoom / 2, Math.min(size * this.zoom / 2, x));
    this.shift = [limit(this.canvas.clientWidth, this.shift[0] + dx), limit(this.canvas.clientHeight, this.shift[1] + dy)];
    this.draw();
  }

  // Bring places of the map into view, as large as they fit.
  focus(places) {
    const to = this.scale(), xs = places.map((one) => to(one)[0]), ys = places.map((one) => to(one)[1]), { clientWidth: width, clientHeight: height } = this.canvas;
    const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const factor = Math.min((width - 190) / (right - left || 1), (height - 110) / (bottom - top || 1), 7 / this.zoom);
    this.magnify(factor, [width / 2, height / 2]);
    const [x, y] = this.scale()([places.reduce((sum, one) => sum + one[0], 0) / places.length, places.reduce((sum, one) => sum + one[1], 0) / places.length]);
    this.pan(width / 2 - x, height / 2 - 12 - y);
  }

  fit() {
    Object.assign(this, { zoom: 1, shift: [0, 0] });
    this.draw();
  }

  // Every dot of the map: x, y, id, title, score, weight. Hits that the sample lacks are on it, too.
  dots() {
    if (!this.map) return [];
    const { answer, soft, map } = this;
    const lights = answer && answer.map === map.generation ? answer.lights : [];
    const weight = (score) => (!soft || soft.best === null || score === null || score === undefined || (soft.floor !== null && score < soft.floor) ? 0 : soft.most * Math.exp(Math.min(0, (score - soft.best) / soft.temperature)));
    const found = map.points.map(([x, y], i) => ({ i, x, y, id: map.records[i][0], title: map.records[i][1] || map.records[i][0], score: lights[i], weight: weight(lights[i]), dim: lights[i] === null }));
    const there = new Map(found.map((one) => [one.id, one]));
    (answer?.hits ?? []).forEach((hit, i) => {
      const place = answer.places[i], known = there.get(hit.id);
      if (known) known.hit = true;
      else if (place) found.push({ x: place[0], y: place[1], id: hit.id, title: hit.title || hit.shown_id, score: answer.scores[i], weight: soft ? soft.weights[i] : 0, dim: false, hit: true });
    });
    return found;
  }

  show(map, answer, soft) {
    const before = this.answer?.at;
    Object.assign(this, { map, answer, soft });
    this.all = this.dots().sort((a, b) => b.weight - a.weight);
    for (const name of ["chosen", "hovered"]) if (this[name]) this[name] = this.all.find((one) => one.id === this[name].id) ?? null;
    if (this.chosen) this.picked(this.chosen, this.why(this.chosen));
    if (answer?.at && before && answer.at.join() !== before.join() && !still()) this.glide(this.at ?? before, answer.at);
    else if (!this.gliding) this.at = answer?.at;
    this.draw();
    this.canvas.setAttribute("aria-label", this.said());
  }

  // The question moves to its new place.
  glide(from, to) {
    const begin = performance.now(), run = (this.gliding = {});
    const frame = (now) => {
      if (run !== this.gliding) return;
      const part = Math.min(1, Math.max(0, now - begin) / GLIDE), ease = part * (2 - part);
      this.at = to.map((x, i) => from[i] + ease * (x - from[i]));
      if (part === 1) this.gliding = null;
      else requestAnimationFrame(frame);
      this.draw();
    };
    requestAnimationFrame(frame);
  }

  said() {
    const lit = this.all.slice(0, 3).filter((one) => one.weight > 0).map((one) => `${one.title}, ${share(one.weight)}`);
    return `Map of ${this.all.length} keys on two axes. Arrow keys move it, plus and minus zoom, 0 shows all.${lit.length ? ` The brightest are ${lit.join("; ")}.` : ""}`;
  }

  why(one) {
    const rank = `${this.all.indexOf(one) + 1} of ${this.all.length} by light`, number = typeof one.score === "number" ? `, as exp(${short(one.score)} / ${short(this.soft?.temperature ?? null)}) is that part of the sum over all records` : "";
    return `${rank}: ${one.title}, ${share(one.weight)} of the answer${this.soft ? number : ""}`;
  }

  scale() {
    const { clientWidth: width, clientHeight: height } = this.canvas, { zoom, shift } = this;
    const xs = this.all.map((one) => one.x), ys = this.all.map((one) => one.y);
    const extra = [this.answer?.at, this.soft?.answer, ...this.all.filter(({ hit }) => hit).map(({ x, y }) => [x, y])].filter(Boolean);
    const reach = (values, axis) => { // without the outermost records, which a smaller zoom shows
      values.sort((a, b) => a - b);
      const cut = Math.floor(0.015 * values.length), inner = [values[cut], values[values.length - 1 - cut], ...extra.map((one) => one[axis])], low = Math.min(...inner), high = Math.max(...inner);
      return [(low + high) / 2, Math.max(high - low, 1e-9)];
    };
    const [cx, w] = reach(xs, 0), [cy, h] = reach(ys, 1);
    this.unit = Math.min((width - 40) / w, (height - 62) / h) * zoom;
    return ([x, y]) => [width / 2 + shift[0] + (x - cx) * this.unit, height / 2 - 12 + shift[1] - (y - cy) * this.unit];
  }

  draw() {
    const { canvas, theme } = this, ratio = window.devicePixelRatio || 1, { clientWidth: width, clientHeight: height } = canvas;
    if (!width || !this.map) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d"), colours = THEMES[theme];
    pen.scale(ratio, ratio);
    if (!this.all.length) return;
    const to = (this.to = this.scale()), grown = Math.min(2.2, this.zoom ** 0.35);
    for (const one of this.all) {
      const [x, y] = (one.xy = to([one.x, one.y])), own = this.colours.of(one.i, theme);
      pen.globalAlpha = one.dim ? 0.18 : own && own !== PALE[theme] ? 0.75 : 0.55;
      pen.fillStyle = own ?? `rgb(${colours.dot})`;
      pen.beginPath();
      pen.arc(x, y, (own ? 1.9 : 1.3) * grown, 0, 7);
      pen.fill();
    }
    pen.globalAlpha = 1;
    pen.globalCompositeOperation = colours.blend;
    for (let i = this.all.length - 1; i >= 0; i--) this.lit(pen, colours, this.all[i]); // the brightest last
    pen.globalCompositeOperation = "source-over";
    this.lines(pen, colours, to);
    this.marks(pen, colours, to);
    this.names(pen, colours, to, width, height);
    this.describe();
  }

  // Radius² × opacity is in proportion to the weight, so the light of a record is its share, whatever the others have.
  lit(pen, colours, { xy: [x, y], weight }) {
    if (weight < 1e-6) return;
    const radius = Math.max(2, 58 * Math.sqrt(weight)), opacity = Math.min(0.92, (3100 * weight) / radius ** 2);
    const glow = pen.createRadialGradient(x, y, 0, x, y, radius);
    glow.addColorStop(0, `rgba(${colours.glow}, ${opacity})`);
    glow.addColorStop(0.4, `rgba(${colours.glow}, ${colours.half * opacity})`);
    glow.addColorStop(1, `rgba(${colours.glow}, 0)`);
    pen.fillStyle = glow;
    pen.fillRect(x - radius, y - radius, 2 * radius, 2 * radius);
    if (weight < 1e-3) return;
    pen.globalAlpha = Math.min(1, 4 * weight ** 0.5);
    pen.fillStyle = colours.core;
    pen.beginPath();
    pen.arc(x, y, 1 + 2.6 * Math.sqrt(weight), 0, 7);
    pen.fill();
    pen.globalAlpha = 1;
  }

  lines(pen, colours, to) {
    if (this.trail.length > 1) {
      const places = this.trail.map(to), stroke = (i) => colours.trail[Math.min(3, Math.floor((4 * i) / places.length))];
      pen.lineWidth = 2.4;
      pen.lineCap = "round";
      for (let i = 1; i < places.length; i++) {
        pen.strokeStyle = stroke(i);
        pen.beginPath();
        pen.moveTo(...places[i - 1]);
        pen.lineTo(...places[i]);
        pen.stroke();
      }
    }
    if (!this.at || this.lesson) return;
    const from = to(this.at);
    pen.strokeStyle = colours.query;
    for (const one of this.all.filter(({ hit }) => hit).slice(0, 10)) {
      pen.globalAlpha = 0.25 + 0.6 * Math.sqrt(one.weight);
      pen.lineWidth = 0.8 + 3 * Math.sqrt(one.weight);
      pen.beginPath();
      pen.moveTo(...from);
      pen.lineTo(...one.xy);
      pen.stroke();
    }
    pen.globalAlpha = 1;
  }

  marks(pen, colours, to) {
    if (this.lesson) drawLesson(pen, colours, this, to);
    if (this.at) {
      pen.strokeStyle = colours.query;
      pen.lineWidth = 2.5;
      pen.beginPath();
      pen.arc(...to(this.at), 8, 0, 7);
      pen.stroke();
    }
    if (this.soft?.answer) {
      const [x, y] = to(this.soft.answer);
      pen.fillStyle = colours.answer;
      pen.strokeStyle = colours.ink;
      pen.lineWidth = 1;
      pen.beginPath();
      for (const [dx, dy] of [[0, -7], [6, 0], [0, 7], [-6, 0]]) pen.lineTo(x + dx, y + dy);
      pen.closePath();
      pen.fill();
      pen.stroke();
    }
    if (!this.chosen) return;
    const [x, y] = this.chosen.xy;
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 1.5;
    pen.strokeRect(x - 6, y - 6, 12, 12);
  }

  // Names of records first, then of regions, each where it covers no other and no mark.
  names(pen, colours, to, width, height) {
    const taken = [this.at, this.soft?.answer].filter(Boolean).map(to).map(([x, y]) => [x - 10, y - 10, x + 10, y + 10]);
    taken.push([0, height - 26, width, height], [width - 44, 0, width, 116]);
    const place = (text, x, y, font, style, opacity, centred) => {
      pen.font = font;
      const w = pen.measureText(text).width, left = centred ? x - w / 2 : x + 9 + w > width ? x - 9 - w : x + 9, box = [left - 3, y - 9, left + w + 3, y + 9];
      if (box[0] < 2 || box[2] > width - 2 || box[1] < 2 || taken.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3])) return;
      taken.push(box);
      pen.globalAlpha = opacity;
      pen.lineWidth = 3;
      pen.strokeStyle = colours.paper;
      pen.strokeText(text, left, y);
      pen.fillStyle = style;
      pen.fillText(text, left, y);
      pen.globalAlpha = 1;
    };
    const cut = (text) => (text.length > 22 ? `${text.slice(0, 21)}…` : text);
    pen.textBaseline = "middle";
    pen.lineJoin = "round";
    const right = this.lesson && this.all.find(({ id }) => id === this.lesson.right);
    const inside = ({ xy: [x, y] }) => x > 0 && y > 0 && x < width && y < height - 26;
    const shown = [...(right ? [right] : []), ...this.all.filter((one) => one.hit && one !== right).slice(0, 4)];
    if (this.zoom > 3 && !this.lesson) shown.push(...this.all.filter((one) => !shown.includes(one) && inside(one)).slice(0, 30));
    for (const one of shown) if (one !== this.chosen && one !== this.hovered) place(cut(one.title), ...one.xy, `${one === right ? "600 " : ""}12px system-ui, sans-serif`, one === right ? colours.pull : colours.ink, one.hit || one === right ? 1 : 0.75, false);
    for (const [name, x, y, level] of this.map.names) if (level <= (this.zoom > 1.7 ? 1 : 0)) place(cut(name), ...to([x, y]), `italic ${level ? 13 : 15}px Georgia, serif`, colours.ink, 0.75, true);
  }

  nearest([mx, my]) {
    let best = null, least = 16 * 16;
    for (const one of this.all) {
      const far = one.xy ? (one.xy[0] - mx) ** 2 + (one.xy[1] - my) ** 2 : Infinity;
      if (far < least) [best, least] = [one, far];
    }
    return best;
  }

  hover(one) {
    if (one === this.hovered) return;
    this.hovered = one;
    this.draw();
  }

  choose(one) {
    this.chosen = one;
    this.picked(one, one ? this.why(one) : "");
    this.draw();
  }

  describe() {
    const one = this.hovered ?? this.chosen;
    const [x, y] = one?.xy ?? [-1, -1], { clientWidth: width, clientHeight: height } = this.canvas;
    this.tip.hidden = x < 0 || y < 0 || x > width || y > height;
    if (this.tip.hidden) return;
    const right = x > width / 2;
    this.tip.textContent = `${one.title} · ${share(one.weight)} of the answer`;
    Object.assign(this.tip.style, { top: `${y + 10}px`, left: right ? "auto" : `${x + 10}px`, right: right ? `calc(100% - ${x - 10}px)` : "auto" });
  }

  // The next one by light, for those who walk by keyboard; brought into view.
  step(by) {
    const now = this.chosen ? this.all.indexOf(this.chosen) : by > 0 ? -1 : 0;
    const one = this.all[Math.min(this.all.length - 1, Math.max(0, now + by))], { clientWidth: width, clientHeight: height } = this.canvas;
    if (one.xy && (one.xy[0] < 0 || one.xy[1] < 0 || one.xy[0] > width || one.xy[1] > height - 26)) this.pan(width / 2 - one.xy[0], height / 2 - one.xy[1]);
    this.choose(one);
  }
}
