// Shows the service tiers: how many requests kept their targets, and what became of the others.
import { element, setText } from "../shared/element.js";
import { count, duration, percent, plural } from "../shared/format.js";
import { BarRow, fitRows } from "../charts/bar_row.js";
import { Panel } from "./panel.js";

const TARGETS = [["ttft", "first token"], ["tpot", "per token"], ["e2e", "whole answer"]];
const COLUMNS = [
  ["Tier", "its weight and targets"],
  ["Ended", "requests that ended in the last minutes"],
  ["Kept all targets", "share of these requests (goodput)"],
  ["TTFT", "share that kept the target for the first token"],
  ["TPOT", "share that kept the target for the time per token"],
  ["E2E", "share that kept the target for the whole answer"],
  ["Late by", "mean delay beyond the targets, times the weight"],
  ["Refused", "since the start: refused because the target could not be met"],
  ["Expired", "since the start: strict requests that were ended at their deadline"],
  ["Relegated", "since the start: moved behind the others because the target was out of reach"],
  ["Runaways", "since the start: answers that reached the predicted limit of their tier"],
  ["Broken", "since the start: accepted requests whose target was not kept, of all that could have been refused"],
];

export class ServicePanel {
  #rows = [];

  constructor() {
    this.panel = new Panel({ id: "service", title: "Service tiers", size: "wide" });
    this.panel.node.hidden = true; // until a state has tiers
    const heads = COLUMNS.map(([name, title], i) => element("th", { scope: "col", title, class: i === 2 ? "kept" : null }, name));
    this.body = element("tbody", {});
    this.table = element("table", { class: "tier-table" }, element("thead", {}, element("tr", {}, ...heads)), this.body);
    this.tenantsHead = element("p", { class: "group" });
    this.tenants = element("div", { class: "tenants" });
    this.tenantRows = [];
    this.panel.body.append(element("div", { class: "scroller" }, this.table), this.tenantsHead, this.tenants);
  }

  update({ service }) {
    const isThere = service !== null && service !== undefined && service.tiers.length + service.tenants.length > 0;
    this.panel.node.hidden = !isThere;
    if (!isThere) return;
    this.panel.note(noteOf(service));
    this.table.hidden = service.tiers.length === 0;
    fitRows(this.body, this.#rows, service.tiers.length, () => new TierRow());
    service.tiers.forEach((tier, i) => this.#rows[i].update(tier));
    this.#showTenants(service);
  }

  #showTenants({ tenants, num_tenants: number, jain_index: jain }) {
    this.tenantsHead.hidden = tenants.length === 0;
    setText(this.tenantsHead, `Tenants: share of the service, ${plural(number, "tenant")} in all, evenness (Jain) ${jain.toFixed(2)}`);
    fitRows(this.tenants, this.tenantRows, tenants.length);
    tenants.forEach(({ tier, name, share, good }, i) => this.tenantRows[i].update({
      name: tier ? `${name} (${tier})` : name,
      share,
      figure: percent(share),
      label: `${name}: ${percent(share)} of the service${good === null ? "" : `, ${percent(good)} of its requests kept their targets`}`,
    }));
  }
}

class TierRow {
  constructor() {
    this.name = element("th", { scope: "row" });
    this.targets = element("span", { class: "muted" });
    this.title = element("span", {});
    this.name.append(this.title, this.targets);
    this.kept = new BarRow();
    this.cells = COLUMNS.slice(1).map(() => element("td", {}));
    this.cells[1].append(this.kept.node);
    this.node = element("tr", {}, this.name, ...this.cells);
  }

  update(tier) {
    setText(this.title, tier.name);
    setText(this.targets, ` ${targetsOf(tier)}`);
    const [ended, , ttft, tpot, e2e, late, refused, expired, relegated, runaways, broken] = this.cells;
    setText(ended, count(tier.finished));
    this.kept.update({
      name: "",
      share: tier.good ?? 0,
      figure: tier.good === null ? "none ended" : percent(tier.good),
      label: `${tier.name}: ${tier.good === null ? "no request ended" : `${percent(tier.good)} of the requests kept all their targets`}`,
    });
    for (const [cell, name] of [[ttft, "ttft"], [tpot, "tpot"], [e2e, "e2e"]]) setText(cell, percent(tier.attained[name]));
    setText(late, tier.mean_tardiness_s === null ? "–" : duration(tier.mean_tardiness_s));
    setText(refused, count(tier.refused_total));
    setText(expired, count(tier.expired_total));
    setText(relegated, count(tier.relegated_total));
    setText(runaways, count(tier.runaways_total));
    setText(broken, `${count(tier.broken_total)} of ${count(tier.broken_total + tier.kept_total)}`);
  }
}

function noteOf({ order, window_s: windowS, forecast }) {
  const error = forecast.median_error === null ? "" : `; forecasts of the first token are off by ${percent(forecast.median_error)}`;
  return `order ${order}, shares of the last ${duration(windowS)}${error}`;
}

/** "weight 4: first token 1.0 s, per token 0.1 s" */
function targetsOf({ weight, targets }) {
  const parts = TARGETS.filter(([name]) => name in targets).map(([name, words]) => `${words} ${secondsOf(targets[name])}`);
  return `weight ${weight}${parts.length ? `: ${parts.join(", ")}` : ""}`;
}

function secondsOf(seconds) {
  return seconds < 1 ? `${Math.round(seconds * 10000) / 10} ms` : duration(seconds);
}
