// The map: a sample of the keys on a plane, each as bright as it weighs, with the question and the answer.

import { share } from "./results.js";

const THEMES = {
  dark: { dot: "150, 160, 195", glow: "255, 178, 62", core: "#ffe2ae", query: "#7cc4ff", answer: "#ff8a9b", ink: "#ebe8e1", blend: "lighter" },
  light: { dot: "120, 110, 90", glow: "224, 142, 11", core: "#a65c00", query: "#14619f", answer: "#b3264a", ink: "#1f1c16", blend: "source-over" },
};

export class Sky {
  constructor(canvas, tip, onVisit) {
    Object.assign(this, { canvas, tip, onVisit, map: null, answer: null, soft: null, trail: [], theme: "dark", chosen: null });
    new ResizeObserver(() => this.draw()).observe(canvas);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.choose(null));
    canvas.addEventListener("click", () => this.chosen && this.onVisit(this.chosen.id));
  }

  // Every dot of the map: x, y, id, title, weight. Hits that the sample lacks are on it, too.
  dots() {
    if (!this.map) return [];
    const { answer, soft, map } = this;
    const lights = answer && answer.map === map.generation ? answer.lights : [];
    const weight = (score) => (!soft || soft.best === null || score === null || score === undefined || (soft.floor !== null && score < soft.floor) ? 0 : soft.most * Math.exp(Math.min(0, (score - soft.best) / soft.temperature)));
    const found = map.points.map(([x, y], i) => ({ x, y, id: map.records[i][0], title: map.records[i][1] || map.records[i][0], weight: weight(lights[i]), dim: lights[i] === null }));
    const there = new Set(map.records.map((one) => one[0]));
    (answer?.hits ?? []).forEach((hit, i) => {
      const place = answer.places[i];
      if (place && !there.has(hit.id)) found.push({ x: place[0], y: place[1], id: hit.id, title: hit.title || hit.shown_id, weight: soft ? soft.weights[i] : 0, dim: false });
    });
    return found;
  }

  show(map, answer, soft) {
    if (answer !== this.answer) this.trail = [];
    Object.assign(this, { map, answer, soft });
    if (soft?.answer) this.trail = [...this.trail.filter((one) => one.t !== soft.temperature), { t: soft.temperature, at: soft.answer }].sort((a, b) => a.t - b.t).slice(-400);
    this.all = this.dots().sort((a, b) => b.weight - a.weight);
    if (this.chosen) this.chosen = this.all.find((one) => one.id === this.chosen.id) ?? null;
    this.draw();
    this.canvas.setAttribute("aria-label", this.said());
  }

  said() {
    const lit = this.all.slice(0, 3).filter((one) => one.weight > 0).map((one) => `${one.title}, ${share(one.weight)}`);
    return `Map of ${this.all.length} keys on two axes.${lit.length ? ` The brightest are ${lit.join("; ")}.` : ""}`;
  }

  scale() {
    const { width, height } = this.canvas.getBoundingClientRect();
    const xs = this.all.map((one) => one.x), ys = this.all.map((one) => one.y);
    for (const at of [this.answer?.at, this.soft?.answer]) if (at) { xs.push(at[0]); ys.push(at[1]); }
    const reach = (values) => { const low = Math.min(...values), high = Math.max(...values); return [(low + high) / 2, Math.max(high - low, 1e-9)]; };
    const [cx, w] = reach(xs), [cy, h] = reach(ys);
    const by = Math.min((width - 44) / w, (height - 44) / h);
    return ([x, y]) => [width / 2 + (x - cx) * by, height / 2 - (y - cy) * by];
  }

  draw() {
    const { canvas, theme } = this, ratio = window.devicePixelRatio || 1, { width, height } = canvas.getBoundingClientRect();
    if (!width || !this.map) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d"), colours = THEMES[theme];
    pen.scale(ratio, ratio);
    if (!this.all.length) return;
    const to = (this.to = this.scale());
    const brightest = Math.max(...this.all.map((one) => one.weight), 1e-300);
    for (const one of this.all) {
      const [x, y] = to([one.x, one.y]);
      pen.fillStyle = `rgba(${colours.dot}, ${one.dim ? 0.15 : 0.6})`;
      pen.beginPath();
      pen.arc(x, y, 1.3, 0, 7);
      pen.fill();
    }
    pen.globalCompositeOperation = colours.blend;
    for (let i = this.all.length - 1; i >= 0; i--) { // the brightest last
      const one = this.all[i], relative = one.weight / brightest;
      if (relative < 1e-3) continue;
      const [x, y] = to([one.x, one.y]), light = relative ** 0.6, radius = 4 + 7 * light + 30 * Math.sqrt(one.weight);
      const glow = pen.createRadialGradient(x, y, 0, x, y, radius);
      glow.addColorStop(0, `rgba(${colours.glow}, ${0.9 * light})`);
      glow.addColorStop(0.35, `rgba(${colours.glow}, ${0.28 * light})`);
      glow.addColorStop(1, `rgba(${colours.glow}, 0)`);
      pen.fillStyle = glow;
      pen.fillRect(x - radius, y - radius, 2 * radius, 2 * radius);
      pen.globalAlpha = light;
      pen.fillStyle = colours.core;
      pen.beginPath();
      pen.arc(x, y, 1 + 2.2 * Math.sqrt(one.weight) + 0.5 * light, 0, 7);
      pen.fill();
      pen.globalAlpha = 1;
    }
    pen.globalCompositeOperation = "source-over";
    this.marks(pen, colours, to);
  }

  marks(pen, colours, to) {
    if (this.trail.length > 1) {
      pen.strokeStyle = colours.answer;
      pen.globalAlpha = 0.6;
      pen.lineWidth = 1.2;
      pen.setLineDash([2, 3]);
      pen.beginPath();
      for (const one of this.trail) pen.lineTo(...to(one.at));
      pen.stroke();
      pen.setLineDash([]);
      pen.globalAlpha = 1;
    }
    if (this.answer?.at) {
      const [x, y] = to(this.answer.at);
      pen.strokeStyle = colours.query;
      pen.lineWidth = 2.5;
      pen.beginPath();
      pen.arc(x, y, 8, 0, 7);
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
    if (this.chosen) {
      const [x, y] = to([this.chosen.x, this.chosen.y]);
      pen.strokeStyle = colours.ink;
      pen.lineWidth = 1.5;
      pen.strokeRect(x - 6, y - 6, 12, 12);
    }
  }

  point(event) {
    if (!this.to || !this.all) return;
    const box = this.canvas.getBoundingClientRect(), mx = event.clientX - box.left, my = event.clientY - box.top;
    let best = null, least = 14 * 14;
    for (const one of this.all) {
      const [x, y] = this.to([one.x, one.y]), far = (x - mx) ** 2 + (y - my) ** 2;
      if (far < least) [best, least] = [one, far];
    }
    this.choose(best);
  }

  choose(one) {
    if (one === this.chosen) return;
    this.chosen = one;
    this.tip.hidden = !one;
    this.draw();
    if (!one) return;
    const [x, y] = this.to([one.x, one.y]), right = x > this.canvas.getBoundingClientRect().width / 2;
    this.tip.textContent = `${one.title} · ${share(one.weight)}`;
    Object.assign(this.tip.style, { top: `${y + 10}px`, left: right ? "auto" : `${x + 10}px`, right: right ? `calc(100% - ${x - 10}px)` : "auto" });
  }

  // The next one by brightness, for those who walk by keyboard; says which it is.
  step(by) {
    if (!this.all?.length) return "There is nothing on the map.";
    const now = this.chosen ? this.all.indexOf(this.chosen) : by > 0 ? -1 : 0;
    const next = Math.min(this.all.length - 1, Math.max(0, now + by));
    this.choose(this.all[next]);
    return `${next + 1} of ${this.all.length}: ${this.chosen.title}, ${share(this.chosen.weight)}`;
  }
}
