// What the database is: records, index, recall, durability.

import { count, facts, make, share } from "./results.js";

const size = (bytes) => {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  const step = bytes < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(bytes) / 3));
  return `${step ? (bytes / 1000 ** step).toPrecision(3) : bytes} ${units[step]}`;
};

export function showPanels($, about) {
  const { index } = about, memory = about.path === null;
  facts($("panel-records"), [
    ["Records", count(about.records)],
    ["Without a key", about.keyless ? count(about.keyless) : null],
    ["Keys", `${count(about.dim)} × ${about.dtype}`],
    ["Compared by", { dot: "dot product", cosine: "cosine", l2: "squared distance" }[about.metric]],
    ["Values", about.values === "classes" ? `${count(about.num_classes)} classes` : about.values === "keys" ? "the keys" : `${count(about.value_dim)} numbers`],
    ["Encoder", about.encoder ?? "none"],
    ["Words", about.text_index ?? "not indexed"],
    ["Indexed fields", about.fields.join(", ") || "none"],
  ]);
  const exact = !index || index.kind === "flat";
  facts($("panel-index"), exact
    ? [["Kind", "none: every record is compared"], ["Why", index?.reason || null], ["Kernels", about.kernels]]
    : [["Kind", index.kind], ["Codes", index.codes], ["Size", size(index.bytes)], ["Records", count(index.records)],
       ["Not yet in it", count(index.unindexed)], ["Being built", index.building], ["Kernels", about.kernels]]);
  facts($("panel-recall"), exact
    ? [["Recall", "100 %: search is exact"]]
    : [["Measured", `${share(index.recall)} at ${index.k}`], ["Asked for", share(index.target)], ["Target", index.met ? "met" : "not met"],
       ["Of live searches", index.live_checked ? `${share(index.live_recall)} of ${count(index.live_checked)}` : null]]);
  facts($("panel-durability"), memory
    ? [["On disk", "nothing: in memory"]]
    : [["On disk", size(about.bytes)], ["Generation", count(about.generation)], ["Segments", count(about.segments)],
       ["Deleted, not compacted", count(about.dead)], ["Opened", "for reading"]]);
  if (!memory) $("panel-durability").append(make("dt", "", "Check every byte"), make("dd", "", "softdb verify"));
}
