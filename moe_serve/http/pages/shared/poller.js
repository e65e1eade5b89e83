// Polls the state every second and reports the connection's status. A restarted server is recognised
// by its start time; its events are then requested from the first one.
import { getJson, KeyNeeded, Refused } from "./api.js";

const INTERVAL_MS = 1000;
const TIMEOUT_MS = 5000;
const MAX_PAUSE_MS = 5000;

export class Poller {
  #lastSeq = 0;
  #started = null;
  #lastAnswer = null; // time of the last answer by this page's clock, in ms
  #numFailures = 0;
  #timer = null;
  #isAsking = false;
  #isLocked = false;

  /** `onState(state, isRestarted)`, `onStatus({kind, text, silentMs, error})`. */
  constructor(onState, onStatus) {
    this.onState = onState;
    this.onStatus = onStatus;
    document.addEventListener("visibilitychange", () => document.hidden || this.askNow());
    setInterval(() => this.#tellSilence(), 1000);
  }

  askNow() {
    clearTimeout(this.#timer);
    this.#isLocked = false;
    return this.#ask();
  }

  async #ask() {
    if (this.#isAsking) return;
    this.#isAsking = true;
    try {
      let state = await this.#read();
      const isRestarted = this.#started !== null && state.server.started !== this.#started;
      if (isRestarted) {
        this.#lastSeq = 0;
        state = await this.#read();
      }
      this.#answered(state, isRestarted);
    } catch (error) {
      this.#failed(error);
    } finally {
      this.#isAsking = false;
    }
    if (!this.#isLocked) this.#timer = setTimeout(() => this.#ask(), this.#pause());
  }

  #read() {
    return getJson(`dashboard/state?since=${this.#lastSeq}`, TIMEOUT_MS);
  }

  #answered(state, isRestarted) {
    this.#started = state.server.started;
    this.#lastAnswer = Date.now();
    this.#numFailures = 0;
    for (const event of state.events) this.#lastSeq = Math.max(this.#lastSeq, event.seq);
    this.onStatus(
      state.server.is_ready ? { kind: "live", text: "live" } : { kind: "busy", text: "not ready" },
    );
    this.onState(state, isRestarted);
  }

  #failed(error) {
    this.#numFailures += 1;
    if (error instanceof KeyNeeded) {
      this.#isLocked = true;
      this.onStatus({ kind: "locked", text: "an API key is needed", error });
    } else if (error instanceof Refused) {
      this.onStatus({ kind: "lost", text: `refused (${error.status}); trying again`, error });
    } else {
      if (error.name !== "NoAnswer" && error.constructor.name !== "NoAnswer") console.error(error);
      this.#tellSilence();
    }
  }

  #tellSilence() {
    if (this.#numFailures === 0 || this.#isLocked) return;
    const silentMs = this.#lastAnswer === null ? null : Date.now() - this.#lastAnswer;
    const text = silentMs === null
      ? "no answer yet; trying again"
      : `no answer since ${Math.max(1, Math.round(silentMs / 1000))} s; trying again`;
    this.onStatus({ kind: "lost", text, silentMs });
  }

  /** A hidden page polls rarely. */
  #pause() {
    if (document.hidden) return 15 * INTERVAL_MS;
    return Math.min(INTERVAL_MS * Math.max(1, this.#numFailures), MAX_PAUSE_MS);
  }
}
