// Shows requests, throughput and latency as lines over five minutes.
import { element, setText } from "../shared/element.js";
import { compact, count, milliseconds, plural } from "../shared/format.js";
import { ChartLegend, LineChart, lastNumber } from "../charts/line_chart.js";
import { Panel } from "./panel.js";

export class RequestsPanel {
  constructor() {
    const series = [
      { name: "running", variable: "series-1" },
      { name: "waiting", variable: "series-2" },
    ];
    this.panel = new Panel({ id: "requests", title: "Requests" });
    this.legend = new ChartLegend(series);
    this.chart = new LineChart({ label: "Requests over five minutes", series, format: compact, height: 190 });
    this.panel.body.append(this.legend.node, this.chart.node);
  }

  update({ requests, history, now }) {
    this.legend.update([count(requests.running), count(requests.waiting)]);
    this.panel.note(requests.waiting ? `${plural(requests.waiting, "request")} waiting` : "");
    this.chart.update({ t: history.t, now, values: [history.running, history.waiting] });
  }
}

export class ThroughputPanel {
  constructor() {
    this.panel = new Panel({ id: "throughput", title: "Tokens per second" });
    this.lines = [
      ["generated", "generated_per_s", "series-1"],
      ["prompt", "prompt_per_s", "series-2"],
    ].map(([name, field, variable]) => {
      const series = [{ name, variable }];
      const legend = new ChartLegend(series);
      const label = `${name} tokens per second over five minutes`;
      const chart = new LineChart({ label, series, format: compact, height: 92 });
      this.panel.body.append(legend.node, chart.node);
      return { field, legend, chart };
    });
  }

  update({ history, now }) {
    for (const { field, legend, chart } of this.lines) {
      legend.update([compact(lastNumber(history[field]))]);
      chart.update({ t: history.t, now, values: [history[field]] });
    }
  }
}

/** TTFT or TPOT: three quantiles of the window, and the mean of each second. */
export class LatencyPanel {
  constructor({ id, title, meaning, field }) {
    this.field = field;
    this.meaning = meaning;
    this.panel = new Panel({ id, title });
    this.values = ["p50", "p90", "p99"].map((name) => [name, element("dd", {}, "–")]);
    const quantiles = this.values.map(([name, value]) =>
      element("div", {}, element("dt", {}, name), value));
    const series = [{ name: title, variable: "series-1" }];
    this.chart = new LineChart({ label: `${title} over five minutes`, series, format: milliseconds, height: 148 });
    this.panel.body.append(element("dl", { class: "quantiles" }, ...quantiles), this.chart.node);
  }

  update({ latency, history, now }) {
    const quantiles = latency[this.field];
    for (const [name, value] of this.values) setText(value, milliseconds(quantiles?.[name]));
    this.panel.note(quantiles
      ? `${this.meaning}, ${count(quantiles.count)} in ${latency.window_s} s`
      : `${this.meaning}, none in the last ${latency.window_s} s`);
    this.chart.update({ t: history.t, now, values: [history[this.field]] });
  }
}
