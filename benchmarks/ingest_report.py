"""Medians, ratios and a table of the runs of `ingest.py`."""

from __future__ import annotations

from typing import Any

import common
from peers import ENGINES

__all__ = ["summarise", "table"]


def summarise(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians and spreads of the successful runs, and softdb's ratios to the best peers."""
    engines = {}
    for name, results in runs.items():
        succeeded = [result for result in results if "error" not in result]
        kind = ENGINES[name]
        facts: dict[str, Any] = {"synced": kind.synced, "durability": kind.durability, "index": kind.index}
        facts["versions"] = common.versions(kind.packages)
        facts["errors"] = [result["error"] for result in results if "error" in result]
        if succeeded:
            measured = ("rows_per_s", "rows_per_s_with_prepare", "rows_per_s_synced", "sync_s", "first_answer_s")
            facts |= {key: common.spread([result[key] for result in succeeded]) for key in measured}
            facts["rows"] = min(result["rows"] for result in succeeded)
            facts["capped"] = any(result["capped"] for result in succeeded)
            facts["peak_anonymous"] = max(result["peak_anonymous"] for result in succeeded)
            facts["anonymous_before"] = min(result["anonymous_before"] for result in succeeded)
            facts["disk"] = succeeded[-1]["disk"]
            facts["found_themselves"] = min(result["found_themselves"] for result in succeeded)
        engines[name] = facts | {"runs": results}
    return {"engines": engines, "ratios": ratios(engines)}


def ratios(engines: dict[str, Any]) -> dict[str, Any]:
    """Return softdb's median rate over that of the best peer: of all, with an fsync, with preparation, if durable."""
    ours = engines.get("softdb", {})
    if "rows_per_s" not in ours:
        return {}
    peers = {name: facts for name, facts in engines.items() if name != "softdb" and "rows_per_s" in facts}
    durable = {name: facts for name, facts in peers.items() if facts["synced"] == "yes"}
    result = {}
    for label, among, key in (
        ("best peer", peers, "rows_per_s"),
        ("best peer, an fsync of its files included", peers, "rows_per_s_synced"),
        ("best peer, preparation included", peers, "rows_per_s_with_prepare"),
        ("best peer that syncs before it returns", durable, "rows_per_s"),
    ):
        if among:
            best = max(among, key=lambda name: float(among[name][key]["median"]))
            ratio = ours[key]["median"] / among[best][key]["median"]
            result[label] = {"peer": best, "softdb_over_peer": round(ratio, 3)}
    return result


def table(result: dict[str, Any]) -> str:
    """Format the result as a table."""
    disk, machine, workload = result["disk"], result["machine"], result["workload"]
    lines = [
        f"{workload['data']}: {workload['n']:,} records x {workload['dim']}, "
        f"{'with' if workload['payload'] else 'without'} payload, batches of {workload['batch']:,}",
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, load {machine['load_average'][0]}",
        f"disk ({disk['file_system']}): {disk['each_fsync_mb_s']} MB/s with an fsync every "
        f"{disk['block_bytes'] / common.MIB:g} MiB, {disk['one_fsync_mb_s']} MB/s with one at the end",
        "",
        f"{'engine':8} {'version':8} {'rows':>9} {'rows/s median (min-max)':>28} {'+prepare':>9} {'+fsync':>9} "
        f"{'peak MiB':>9} {'before MiB':>10} {'disk MiB':>9} {'1st answer':>10}  synced / index",
    ]
    lines += [_line(name, facts) for name, facts in result["engines"].items()]
    lines += [f"softdb / {label} ({r['peer']}): {r['softdb_over_peer']}" for label, r in result["ratios"].items()]
    return "\n".join(lines)


def _line(name: str, facts: dict[str, Any]) -> str:
    version = next(iter(facts["versions"].values())).replace("not installed", "source")
    if "rows_per_s" not in facts:
        return f"{name:8} {version:8} failed: {facts['errors'][0]}"
    rate = facts["rows_per_s"]
    return (
        f"{name:8} {version:8} {facts['rows']:>9,} {rate['median']:>11,.0f} "
        + f"({rate['min']:,.0f}-{rate['max']:,.0f})".rjust(16)
        + f" {facts['rows_per_s_with_prepare']['median']:>9,.0f} {facts['rows_per_s_synced']['median']:>9,.0f}"
        + f" {facts['peak_anonymous'] / common.MIB:>9,.0f} {facts['anonymous_before'] / common.MIB:>10,.0f}"
        + f" {facts['disk']['allocated'] / common.MIB:>9,.0f} {facts['first_answer_s']['median']:>9.2f}s"
        + f"  {facts['synced']} / {facts['index']}"
        + ("  [capped]" if facts["capped"] else "")
        + (f"  [{len(facts['errors'])} failed]" if facts["errors"] else "")
    )
