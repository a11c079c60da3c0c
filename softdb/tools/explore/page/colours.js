// Colours of the map's records by a field: of a few kinds, or along a scale. All are told apart by the colour-blind.

import { count, make, short } from "./results.js";

const KINDS = { // after Okabe and Ito 2008, without the amber of the light
  dark: ["#56b4e9", "#ff7a3d", "#2bc79a", "#f0e442", "#e08bbd", "#9aa5ff", "#c4c4c4"],
  light: ["#0072b2", "#c24a00", "#008060", "#8f8000", "#b5508c", "#5046b8", "#555555"],
};
const SCALE = { dark: [[72, 95, 180], [60, 160, 160], [150, 205, 95], [253, 231, 37]], light: [[225, 190, 20], [85, 170, 90], [35, 110, 140], [60, 10, 90]] };
export const PALE = { dark: "#5b6070", light: "#b3ab9b" };

export class Colours {
  field = null;

  // The colour of the map's i-th record; null where records have none of their own.
  of(i, theme) {
    if (!this.field) return null;
    if (i === undefined) return PALE[theme];
    const { classes, numbers } = this.field;
    if (classes) return KINDS[theme][classes[i]] ?? PALE[theme];
    return numbers[i] === null ? PALE[theme] : this.along((numbers[i] - this.low) / (this.high - this.low || 1), theme);
  }

  along(part, theme) {
    const stops = SCALE[theme], at = Math.min(stops.length - 1.001, Math.max(0, part * (stops.length - 1))), i = Math.floor(at);
    return `rgb(${stops[i].map((low, j) => Math.round(low + (at - i) * (stops[i + 1][j] - low))).join(", ")})`;
  }

  set(field) {
    this.field = field;
    if (!field?.numbers) return;
    const sorted = field.numbers.filter((one) => one !== null).sort((a, b) => a - b);
    [this.low, this.high] = [sorted[Math.floor(0.02 * sorted.length)], sorted[Math.ceil(0.98 * sorted.length) - 1]];
  }

  legend(list, theme) {
    list.hidden = !this.field;
    if (!this.field) return;
    const line = (text, colour) => {
      const item = make("li"), dot = make("i");
      dot.style.background = colour;
      item.append(dot, text);
      return item;
    };
    const { names, classes, numbers } = this.field;
    if (numbers) {
      const scale = [0, 0.25, 0.5, 0.75, 1].map((part) => this.along(part, theme)).join(", "), item = line(`${short(this.low)} to ${short(this.high)}`, `linear-gradient(90deg, ${scale})`);
      item.className = "scale";
      return list.replaceChildren(item);
    }
    const others = classes.filter((i) => i < 0).length;
    list.replaceChildren(...names.map((name, i) => line(name, KINDS[theme][i])), ...(others ? [line(`${count(others)} others`, PALE[theme])] : []));
  }
}
