// A filter, put together by field, operator and value; it stands as JSON, as every call takes it.

import { make } from "./results.js";

const OPERATORS = {
  $eq: "equal to", $ne: "not", $gt: "above", $gte: "at least", $lt: "below", $lte: "at most", $in: "one of", $nin: "none of",
  $startswith: "beginning with", $contains: "containing", $exists: "there (true, false)", $match: "with the words",
};
const OF_TEXT = ["$contains", "$startswith", "$match"];

// What was typed: JSON where it is, a number or true or "quoted"; else a text.
const typed = (text) => {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
};

export class Filters {
  constructor(find, hasWords, onChange) {
    this.$ = find;
    this.onChange = onChange;
    find("add").addEventListener("click", () => this.add());
    find("clear").addEventListener("click", () => this.set(""));
    find("where").addEventListener("change", () => this.set(find("where").value));
    find("field").addEventListener("input", () => this.complete());
    find("value").addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      this.add();
    });
    this.hasWords = hasWords;
  }

  know(fields) {
    this.fields = new Map(fields.map((one) => [one.name, one]));
    const options = fields.map((one) => {
      const option = make("option");
      option.value = one.name;
      option.label = `${one.name} (${one.kinds.join(", ") || "declared"}${one.indexed ? ", indexed" : ""})`;
      return option;
    });
    this.$("fields").replaceChildren(...options);
    this.complete();
  }

  complete() {
    const name = this.$("field").value, field = this.fields.get(name), kept = this.$("operator").value;
    const fitting = name === "$text" ? OF_TEXT : Object.keys(OPERATORS).filter((one) => one !== "$match");
    this.$("operator").replaceChildren(...fitting.filter((one) => one !== "$match" || this.hasWords()).map((one) => {
      const option = make("option", "", OPERATORS[one]);
      option.value = one;
      return option;
    }));
    this.$("operator").value = fitting.includes(kept) ? kept : field?.kinds.includes("list") ? "$contains" : fitting[0];
    this.$("values").replaceChildren(...(field?.values ?? []).map((one) => {
      const option = make("option"), value = JSON.parse(one);
      option.value = typeof value === "string" && typed(value) === value ? value : one;
      return option;
    }));
  }

  add() {
    const name = this.$("field").value, operator = this.$("operator").value, text = this.$("value").value.trim();
    if (!name || !text) {
      this.$(name ? "value" : "field").focus();
      return;
    }
    let value = typed(text);
    if (["$in", "$nin"].includes(operator) && !Array.isArray(value)) value = text.split(",").map((one) => typed(one.trim()));
    if (["$startswith", "$match"].includes(operator)) value = String(value);
    const one = { [name]: operator === "$eq" ? value : { [operator]: value } };
    let before = null;
    try {
      before = this.$("where").value.trim() ? JSON.parse(this.$("where").value) : null;
    } catch {
      before = null; // what is no filter is replaced
    }
    const all = before === null ? one : Array.isArray(before.$and) && Object.keys(before).length === 1 ? { $and: [...before.$and, one] } : { $and: [before, one] };
    this.$("value").value = "";
    this.set(JSON.stringify(all));
    this.$("field").focus();
  }

  set(text, quiet = false) {
    this.$("where").value = text;
    if (!quiet) this.onChange();
  }

  get value() {
    return this.$("where").value.trim();
  }
}
