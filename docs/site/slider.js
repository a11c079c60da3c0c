"use strict";
// The figure of the first page, drawn for one temperature: weights w = softmax(-‖q - k‖² / T), the answer o = Σ w k,
// and the negative gradient in q of ½ ‖o - wanted‖², which is 2 / T Cov_w(k) (wanted - o).
(() => {
  const UNIT = 100, ARROW = 40, SWEEP = 7000; // pixels of a unit and of a gradient of 1; milliseconds
  const figure = document.getElementById("slider");
  const [svg, range, button] = ["svg", "input", "button"].map((name) => figure.querySelector(name));
  const number = (element, name) => Number(element.getAttribute(name)) / UNIT;
  const records = [...figure.querySelectorAll(".record")].map((circle) => {
    const named = (kind) => figure.querySelector(`${kind}[data-name="${circle.dataset.name}"]`);
    return { circle, name: circle.dataset.name, line: named(".pull"), row: named("tr"), x: number(circle, "cx"), y: number(circle, "cy") };
  });
  const ring = figure.querySelector(".wanted"), arrow = figure.querySelector(".gradient");
  const wanted = { x: number(ring, "cx"), y: number(ring, "cy") }, query = { x: number(arrow, "x1"), y: number(arrow, "y1") };
  const set = (element, values) => Object.entries(values).forEach(([name, value]) => element.setAttribute(name, value));
  const pixels = (value) => (value * UNIT).toFixed(1);

  function answered(t) {
    const logits = records.map((k) => -((query.x - k.x) ** 2 + (query.y - k.y) ** 2) / t);
    const powers = logits.map((logit) => Math.exp(logit - Math.max(...logits)));
    const weights = powers.map((power) => power / powers.reduce((a, b) => a + b));
    const mean = (of) => records.reduce((sum, k, i) => sum + weights[i] * of(k), 0);
    const x = mean((k) => k.x), y = mean((k) => k.y);
    const along = (k) => (k.x - x) * (wanted.x - x) + (k.y - y) * (wanted.y - y);
    const gradient = { x: (2 / t) * mean((k) => (k.x - x) * along(k)), y: (2 / t) * mean((k) => (k.y - y) * along(k)) };
    return { weights, x, y, gradient, effective: 1 / weights.reduce((sum, w) => sum + w * w, 0) };
  }

  function draw() {
    const t = 10 ** Number(range.value), { weights, x, y, gradient, effective } = answered(t);
    records.forEach(({ circle, line, row }, i) => {
      circle.setAttribute("r", (4 + 18 * Math.sqrt(weights[i])).toFixed(1));
      set(line, { x2: pixels(x), y2: pixels(y) });
      line.style.opacity = weights[i].toFixed(3);
      row.querySelector("i").style.width = `${(100 * weights[i]).toFixed(1)}%`;
      row.querySelector(".share").textContent = `${Math.round(100 * weights[i])} %`;
    });
    figure.querySelector(".answer").setAttribute("transform", `translate(${pixels(x)} ${pixels(y)})`);
    const size = Math.hypot(gradient.x, gradient.y);
    set(arrow, { x2: (query.x * UNIT + ARROW * gradient.x).toFixed(1), y2: (query.y * UNIT + ARROW * gradient.y).toFixed(1) });
    arrow.style.visibility = size < 0.05 ? "hidden" : "";
    const kind = effective < 1.05 ? "a look-up of one record" : effective > 5.9 ? "the average of all six records" : `a soft query, spread over ${effective.toFixed(1)} records`;
    const verdict = `T = ${t < 1 ? t.toFixed(2) : t.toFixed(1)}: ${kind}; gradient ${size.toFixed(2)}`;
    figure.querySelector(".slider-verdict").textContent = verdict;
    range.setAttribute("aria-valuetext", verdict);
  }

  const still = matchMedia("(prefers-reduced-motion: reduce)");
  let frame = 0;
  function stop() {
    cancelAnimationFrame(frame);
    frame = 0;
    button.textContent = "play";
  }
  function play() {
    const began = performance.now(), low = Number(range.min), high = Number(range.max), start = -0.52;
    const step = (now) => {
      const turn = Math.min(1, (now - began) / SWEEP), share = (start - low) / (high - low);
      // a wave from the start to the average, back to the look-up, and to the start
      const wave = share + (turn < 0.5 ? (1 - share) : share) * Math.sin(2 * Math.PI * turn);
      range.value = low + (high - low) * wave;
      draw();
      if (turn < 1) frame = requestAnimationFrame(step);
      else stop();
    };
    button.textContent = "pause";
    frame = requestAnimationFrame(step);
  }

  range.addEventListener("input", () => { stop(); draw(); });
  button.addEventListener("click", () => (frame ? stop() : play()));
  figure.querySelector(".slider-control").hidden = false;
  button.hidden = still.matches;
  draw();
  if (!still.matches) {
    const seen = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      seen.disconnect();
      if (document.activeElement !== range) play(); // once; the button stops it
    }, { threshold: 0.9 });
    seen.observe(svg);
  }
})();
