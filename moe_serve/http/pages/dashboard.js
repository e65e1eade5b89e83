// The dashboard: polls the state and passes it to every panel.
import { element, setText } from "./shared/element.js";
import { duration } from "./shared/format.js";
import { askForKey } from "./shared/key.js";
import { AdaptersPanel } from "./panels/adapters_panel.js";
import { EventsPanel } from "./panels/events_panel.js";
import { ExpertsPanel } from "./panels/experts_panel.js";
import { KvPanel } from "./panels/kv_panel.js";
import { PlacementPanel, PredictorPanel } from "./panels/placement_panel.js";
import { Poller } from "./shared/poller.js";
import { RanksPanel } from "./panels/ranks_panel.js";
import { ServicePanel } from "./panels/service_panel.js";
import { StepPanel } from "./panels/step_panel.js";
import { Tiles } from "./panels/tiles.js";
import { LatencyPanel, RequestsPanel, ThroughputPanel } from "./panels/traffic_panels.js";

const status = document.getElementById("status");
const notice = document.getElementById("notice");
const tiles = new Tiles(document.getElementById("tiles"));
const parts = [
  new ExpertsPanel(),
  new ServicePanel(),
  new AdaptersPanel(),
  new RequestsPanel(),
  new LatencyPanel({ id: "ttft", title: "TTFT", meaning: "time to the first token", field: "ttft_ms" }),
  new LatencyPanel({ id: "tpot", title: "TPOT", meaning: "time per output token", field: "tpot_ms" }),
  new StepPanel(),
  new ThroughputPanel(),
  new KvPanel(),
  new RanksPanel(),
  new PlacementPanel(),
  new PredictorPanel(),
  new EventsPanel(),
];

function showState(state, isRestarted) {
  const { server } = state;
  const title = element("strong", {}, server.model);
  document.getElementById("server").replaceChildren(
    title, ` · ${server.layout} · ${server.name} ${server.version} · up ${duration(server.uptime_s)}`);
  tiles.update(state);
  for (const part of parts) part.update(state, isRestarted);
  document.body.dataset.updates = `${Number(document.body.dataset.updates ?? 0) + 1}`;
}

function showStatus({ kind, text, silentMs, error }) {
  status.dataset.kind = kind;
  setText(status, text);
  const isLost = kind === "lost" && (silentMs === null || silentMs === undefined || silentMs > 3000);
  document.body.classList.toggle("stale", kind === "lost" || kind === "locked");
  if (kind === "locked") {
    tellNotice("bad", "This server shows its state only with an API key.", "Enter a key");
    enterKey();
  } else if (isLost) {
    tellNotice("bad", error ? error.message : "The server does not answer. The figures below are the last ones received. The page continues when the server is back.");
  } else if (kind === "busy") {
    tellNotice("warn", "The server is not ready: new requests wait or are refused until it is.");
  } else {
    notice.hidden = true;
  }
}

function tellNotice(kind, text, action = null) {
  if (!notice.hidden && notice.dataset.text === text) return;
  notice.dataset.kind = kind;
  notice.dataset.text = text;
  notice.hidden = false;
  notice.replaceChildren(text, ...(action ? [element("button", { type: "button", click: enterKey }, action)] : []));
}

async function enterKey() {
  if (await askForKey()) poller.askNow();
}

for (const part of parts) document.getElementById("panels").append(part.panel.node);
const poller = new Poller(showState, showStatus);
poller.askNow();
