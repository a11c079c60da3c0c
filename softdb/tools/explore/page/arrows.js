// The gradient on the map: where it sends the question, what pulls and pushes it, and how the answer follows.

const LEAST = 54; // pixels of a step's arrow; a shorter one is enlarged, and all others with it

export function arrow(pen, [x, y], [dx, dy], colour, width) {
  const length = Math.hypot(dx, dy);
  if (length < 3) return;
  const head = Math.min(length, 4 + 2.4 * width), ux = dx / length, uy = dy / length, tip = [x + dx, y + dy], neck = [tip[0] - head * ux, tip[1] - head * uy];
  pen.strokeStyle = pen.fillStyle = colour;
  pen.lineWidth = width;
  pen.lineCap = "butt";
  pen.beginPath();
  pen.moveTo(x, y);
  pen.lineTo(...neck);
  pen.stroke();
  pen.beginPath();
  pen.moveTo(...tip);
  pen.lineTo(neck[0] - 0.5 * head * uy, neck[1] + 0.5 * head * ux);
  pen.lineTo(neck[0] + 0.5 * head * uy, neck[1] - 0.5 * head * ux);
  pen.fill();
}

// The factor by which arrows are longer than what they stand for.
export const enlarged = (sky) => Math.max(1, Math.min(200, LEAST / (Math.hypot(...sky.lesson.step) * sky.unit || 1)));

// The answer's move for the question's: d answer / d question, times the step.
export const follows = ({ response, step }) => (response ? [0, 1].map((i) => response[0][i] * step[0] + response[1][i] * step[1]) : null);

export function drawLesson(pen, colours, sky, to) {
  const { lesson, at } = sky;
  if (!at) return;
  const factor = enlarged(sky) * sky.unit, screen = ([x, y]) => [factor * x, -factor * y], from = to(at);
  const path = lesson.path.map(to);
  pen.strokeStyle = pen.fillStyle = colours.query;
  pen.lineWidth = 1.5;
  pen.setLineDash([3, 3]);
  pen.beginPath();
  for (const place of [...path, from]) pen.lineTo(...place);
  pen.stroke();
  pen.setLineDash([]);
  for (const [x, y] of path) {
    pen.beginPath();
    pen.arc(x, y, 3, 0, 7);
    pen.fill();
  }
  const [x, y] = to(lesson.place);
  pen.strokeStyle = colours.pull;
  pen.lineWidth = 2;
  for (const radius of [6, 10]) {
    pen.beginPath();
    pen.arc(x, y, radius, 0, 7);
    pen.stroke();
  }
  const [[, ...own], ...others] = lesson.pulls;
  for (const [, ...move] of others) arrow(pen, from, screen(move), colours.push, 1.2);
  arrow(pen, from, screen(lesson.step.map((sum, i) => sum - own[i])), colours.push, 2);
  arrow(pen, from, screen(own), colours.pull, 4.5);
  arrow(pen, from, screen(lesson.step), colours.ink, 1.8);
  const move = follows(lesson);
  if (move && sky.soft?.answer) arrow(pen, to(sky.soft.answer), screen(move), colours.answer, 2.6);
}
