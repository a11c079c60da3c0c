// The temperature, swept from cold to hot and back to where it starts: once at the first visit, and by a button.

import { kept } from "./theme.js";

const RISE = 6000, REST = 700, FALL = 1800, WAIT = 900; // milliseconds
const ease = (x) => x * x * (3 - 2 * x);

export class Sweep {
  constructor(button, move, start) {
    Object.assign(this, { button, move, start, timer: 0 });
    button.addEventListener("click", () => (this.timer ? this.stop() : this.play()));
    const other = (event) => this.timer && !button.contains(event.target) && this.stop();
    for (const name of ["pointerdown", "keydown", "wheel", "touchstart", "focusin"]) window.addEventListener(name, other, { capture: true, passive: true });
  }

  first() {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    kept("swept", "yes");
    this.timer = setTimeout(() => this.play(), WAIT);
  }

  play() {
    const begin = performance.now();
    this.button.textContent = "■ Stop";
    const frame = (now) => {
      const spent = now - begin, back = spent - RISE - REST, home = this.start();
      this.move(Math.round(spent < RISE ? 1000 * ease(Math.max(0, spent) / RISE) : back < 0 ? 1000 : 1000 + (home - 1000) * ease(Math.min(1, back / FALL))));
      if (back < FALL) this.timer = requestAnimationFrame(frame);
      else this.end();
    };
    this.timer = requestAnimationFrame(frame);
  }

  end() {
    this.stop();
    this.move(null); // exactly where it starts
  }

  stop() {
    cancelAnimationFrame(this.timer);
    clearTimeout(this.timer);
    this.timer = 0;
    this.button.textContent = "▶ Play";
  }
}
