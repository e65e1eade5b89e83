// One answer of the model: its tokens as spans, one tab stop with the arrow keys inside.
import { element, setText } from "../shared/element.js";
import { milliseconds, percent, plural } from "../shared/format.js";
import { similarity } from "./routing.js";
import { paintToken } from "./token_colours.js";
import { TokenText } from "./token_text.js";
import { announce, hideTooltip, showTooltip } from "../shared/tooltip.js";
import { visible } from "./visible_text.js";

const LISTED_LAYERS = 8;
const NARROW = 640; // too narrow for a list of layers; the panel below shows them

export class AnswerView {
  experts = []; // of each token
  text = ""; // sent back to the model in the next turn
  #spans = [];
  #strings = [];
  #drafters = []; // of each token; null if it was not drafted
  #tokenText = new TokenText();
  #selected = null;
  #started = performance.now();
  #first = null;

  /** `onSelect(answer, index)`; `colouring()` returns the colouring of tokens; `numberOf(row)` names a layer. */
  constructor({ onSelect, colouring, numberOf }) {
    this.onSelect = onSelect;
    this.colouring = colouring;
    this.numberOf = numberOf;
    this.said = element("div", {
      class: "said", role: "listbox", "aria-label": "Answer, token by token", "aria-orientation": "horizontal",
      pointerover: (event) => this.#point(event),
      pointerleave: hideTooltip,
      click: (event) => this.#point(event),
      focusin: (event) => this.#point(event),
      focusout: hideTooltip,
      keydown: (event) => this.#move(event),
    });
    this.figures = element("p", { class: "figures" }, "waiting for the first token");
    this.node = element("article", { class: "turn assistant" },
      element("p", { class: "who" }, "Model"), this.said, this.figures);
  }

  get numTokens() {
    return this.experts.length;
  }

  tokenString(index) {
    return this.#strings[index];
  }

  push({ text, reasoning, tokens, experts, drafts }) {
    const shown = reasoning + text;
    this.text += text;
    if (this.#first === null && (shown || tokens.length)) this.#first = performance.now();
    if (experts === null || tokens.length === 0) {
      this.#pushPlain(shown);
    } else {
      tokens.forEach((token, i) => this.#add(token, experts[i] ?? [], reasoning !== "", drafts[i] ?? null));
      for (const { index, text: own } of this.#tokenText.push(tokens, shown)) this.#settle(index, own);
    }
    this.#tellFigures(null);
  }

  finish(reason) {
    this.#tellFigures(reason);
    if (this.text) announce(`Answer: ${this.text}`);
  }

  fail(message) {
    this.finish("failed");
    this.node.append(element("p", { class: "failed", role: "alert" }, message));
  }

  repaint() {
    this.#spans.forEach((span, index) => paintToken(span, this.experts, index, this.colouring()));
  }

  select(index) {
    if (this.#selected !== null) this.#spans[this.#selected].setAttribute("aria-selected", "false");
    this.#selected = index;
    if (index === null) return;
    this.#spans[index].setAttribute("aria-selected", "true");
    for (const span of this.#spans) span.tabIndex = span === this.#spans[index] ? 0 : -1;
  }

  #add(token, experts, isReasoning, drafter) {
    const index = this.#spans.length;
    this.experts.push(experts);
    this.#strings.push(token);
    this.#drafters.push(drafter);
    const span = element("span", {
      class: `token special${isReasoning ? " reasoning" : ""}${drafter ? " drafted" : ""}`, role: "option", "aria-selected": "false",
      tabindex: index === 0 ? 0 : -1, "data-index": index,
    }, token.includes("\ufffd") || token === "" ? "·" : visible(token));
    this.#spans.push(span);
    this.said.append(span);
    paintToken(span, this.experts, index, this.colouring());
  }

  #settle(index, text) {
    const span = this.#spans[index];
    span.classList.remove("special");
    span.classList.toggle("part", text === "");
    setText(span, text === "" ? "·" : visible(text));
  }

  /** Shows the text of a server that sends no experts. */
  #pushPlain(text) {
    if (!text) return;
    for (const { index, text: own } of this.#tokenText.push([], text)) this.#settle(index, own);
    if (this.#tokenText.unclaimed) {
      this.said.append(visible(this.#tokenText.unclaimed));
      this.#tokenText = new TokenText();
    }
  }

  #tellFigures(reason) {
    if (this.#first === null) {
      setText(this.figures, reason ? `no token (${reason})` : "waiting for the first token");
      return;
    }
    const now = performance.now();
    const speed = this.numTokens > 1 ? ` · ${((this.numTokens - 1) / Math.max(1e-3, (now - this.#first) / 1000)).toFixed(0)} tokens/s` : "";
    const tokens = this.numTokens ? plural(this.numTokens, "token") : "experts were not sent";
    const numDrafted = this.#drafters.filter((drafter) => drafter !== null).length;
    const drafted = numDrafted ? ` · ${numDrafted} drafted` : "";
    const end = reason === null ? "" : ` · ended: ${reason}`;
    setText(this.figures, `${tokens}${drafted} · first after ${milliseconds(this.#first - this.#started)}${speed}${end}`);
  }

  #point(event) {
    const span = event.target.closest?.(".token");
    if (!span) return;
    this.#choose(Number(span.dataset.index));
  }

  #move(event) {
    const last = this.numTokens - 1;
    const at = this.#selected ?? 0;
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - 10, ArrowDown: at + 10, Home: 0, End: last }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    const index = Math.min(last, Math.max(0, next));
    this.#spans[index].focus();
    announce(this.#words(index).join(", "));
  }

  #choose(index) {
    if (this.#selected !== index) this.onSelect(this, index);
    const box = this.#spans[index].getBoundingClientRect();
    showTooltip(this.#words(index), box.left, box.bottom - 8);
  }

  #words(index) {
    const experts = this.experts[index];
    const alike = index > 0 && experts.length
      ? `${percent(similarity(experts, this.experts[index - 1]))} of its experts in common with the previous token` : "";
    const drafter = this.#drafters[index];
    const drafted = drafter ? `drafted (${drafter}) and verified with the tokens before it` : "";
    const head = [`token ${index + 1}: ${visible(JSON.stringify(this.#strings[index]))}`, drafted, alike];
    if (window.innerWidth < NARROW) return head.filter((line) => line);
    const layers = experts.slice(0, LISTED_LAYERS).map((ids, row) => `layer ${this.numberOf(row)}: ${ids.join(", ")}`);
    const more = experts.length > LISTED_LAYERS ? `and ${experts.length - LISTED_LAYERS} more layers` : "";
    return [...head, ...layers, more].filter((line) => line);
  }
}
