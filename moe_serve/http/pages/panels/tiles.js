// Shows the most important figures in one line across the page.
import { element, setText } from "../shared/element.js";
import { compact, count, duration, milliseconds, percent } from "../shared/format.js";
import { lastNumber } from "../charts/line_chart.js";
import { whoHasThePages } from "./rank_phase.js";

const TILES = [
  ["running", "Running", ({ requests }) => [count(requests.running), requests.max_running ? `of at most ${count(requests.max_running)}` : ""]],
  ["waiting", "Waiting", ({ requests }) => [count(requests.waiting),
    requests.waiting ? `oldest ${duration(requests.oldest_waiting_s)}`
      : requests.max_waiting ? `room for ${count(requests.max_waiting)}` : ""]],
  ["generated", "Generated tokens/s", ({ history, tokens, speculation }) =>
    [compact(lastNumber(history.generated_per_s) ?? 0), speculation ? perStep(history, speculation) : `${compact(tokens.generated_total)} in all`]],
  ["prompt", "Prompt tokens/s", ({ history, tokens }) =>
    [compact(lastNumber(history.prompt_per_s) ?? 0), `${compact(tokens.prompt_total)} in all`]],
  ["ttft", "TTFT, median", ({ latency }) =>
    [milliseconds(latency.ttft_ms?.p50), latency.ttft_ms ? `p99 ${milliseconds(latency.ttft_ms.p99)}` : `none in ${latency.window_s} s`]],
  ["tpot", "TPOT, median", ({ latency }) =>
    [milliseconds(latency.tpot_ms?.p50), latency.tpot_ms ? `p99 ${milliseconds(latency.tpot_ms.p99)}` : `none in ${latency.window_s} s`]],
  ["kv", "KV pages in use", ({ kv, ranks }) => {
    const away = whoHasThePages({ kv, ranks });
    if (away) return ["–", away];
    const tier = kv.tiers[0];
    return tier ? [percent(tier.used / Math.max(1, tier.pages)), `${compact(tier.used)} of ${compact(tier.pages)}`] : ["–", ""];
  }],
  ["finished", "Finished requests", ({ requests }) =>
    [compact(requests.finished_total), `${compact(requests.failed_total)} failed, ${compact(requests.rejected_total)} refused`]],
];

/** The tokens that a sequence gets from one step, and the share of drafted tokens that were accepted. */
function perStep(history, { tokens_per_step: mean, acceptance }) {
  const lately = lastNumber(history.tokens_per_step) ?? mean;
  const accepted = acceptance === null ? "" : `, ${percent(acceptance)} accepted`;
  return lately === null ? "no step yet" : `${lately.toFixed(2)} per step${accepted}`;
}

export class Tiles {
  constructor(host) {
    this.tiles = TILES.map(([id, title, read]) => {
      const value = element("dd", { class: "value", id: `tile-${id}` }, "–");
      const sub = element("dd", { class: "sub" }, " ");
      host.append(element("dl", { class: "tile" }, element("dt", {}, title), value, sub));
      return { value, sub, read };
    });
  }

  update(state) {
    for (const { value, sub, read } of this.tiles) {
      const [text, below] = read(state);
      setText(value, text);
      setText(sub, below);
    }
  }
}
