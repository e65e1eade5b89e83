// The playground: a conversation whose answers show, token by token, which experts they chose.
import { AnswerView } from "./playground/answer_view.js";
import { getJson, KeyNeeded, NoAnswer } from "./shared/api.js";
import { streamChat } from "./playground/chat_stream.js";
import { ColouringControl } from "./playground/colouring_control.js";
import { element, setText } from "./shared/element.js";
import { AnswerPanel, TokenPanel } from "./playground/expert_panels.js";
import { askForKey } from "./shared/key.js";
import { plural } from "./shared/format.js";
import { extentOf, numberOf } from "./playground/routing.js";

const byId = (id) => document.getElementById(id);
const TRIES = ["What is 17 + 25?", "Tell me a story about a king.", "Write a python function that adds two numbers."];
const RETRY_MS = 3000;

const colouring = new ColouringControl(() => answers.forEach((answer) => answer.repaint()));
const chooseExpert = (row, expert) => colouring.chooseExpert(row, expert);
const tokenPanel = new TokenPanel(byId("token"), chooseExpert);
const answerPanel = new AnswerPanel(byId("answer"), chooseExpert);
let messages = []; // {role, content} of the turns that are sent
let answers = [];
let extent = null; // layers (and their numbers) and experts of the model, once known from the server
let selected = null; // the answer whose token is shown
let nextTry; // the timer of connect()
let isDrawing = false; // the answer's panel is redrawn at the next frame
let running = null; // the AbortController of the running answer

function tellStatus(kind, text) {
  byId("status").dataset.kind = kind;
  setText(byId("status"), text);
}

function tellExtent(known) {
  colouring.setExtent(known);
  answers.forEach((answer) => answer.repaint());
}

/** Reads the model's name and the numbers of its experts; retries until the server answers. */
async function connect() {
  clearTimeout(nextTry);
  try {
    const state = await getJson("dashboard/state", 5000);
    extent = state.experts === null ? null : {
      numLayers: state.experts.num_layers, numExperts: state.experts.num_experts, layers: state.experts.layers,
    };
    if (extent) tellExtent(extent);
    tellStatus(state.server.is_ready ? "live" : "busy", state.server.model);
  } catch (error) {
    if (error instanceof KeyNeeded) {
      tellStatus("locked", "an API key is needed");
      if (await askForKey()) connect();
      return;
    }
    tellStatus("lost", error instanceof NoAnswer ? "no answer; trying again" : error.message);
    const isForNow = error instanceof NoAnswer || error.status >= 500; // 503: the server is loading or shutting down
    if (isForNow) nextTry = setTimeout(connect, RETRY_MS);
  }
}

function select(answer, index) {
  if (selected !== null && selected !== answer) selected.select(null);
  if (selected !== answer) answerPanel.show(answer, extent);
  selected = answer;
  answer.select(index);
  tokenPanel.show(answer, index, extent);
}

function setRunning(controller) {
  running = controller;
  byId("stop").disabled = controller === null;
  byId("send").disabled = controller !== null;
}

function clear() {
  running?.abort();
  messages = [];
  answers = [];
  selected = null;
  tokenPanel.clear();
  answerPanel.clear();
  showWelcome();
  byId("prompt").focus();
}

function showWelcome() {
  const tries = TRIES.map((text) => element("button", {
    type: "button", class: "quiet", click: () => submit(text),
  }, text));
  byId("turns").replaceChildren(element("div", { class: "welcome" },
    element("p", {}, "Talk to the model. Each token of its answers shows which experts the routers chose for it."),
    element("div", { class: "tries" }, ...tries)));
}

function showTurn(node) {
  const turns = byId("turns");
  turns.querySelector(".welcome")?.remove();
  turns.append(node);
  turns.scrollTop = turns.scrollHeight;
}

function requestBody() {
  const system = byId("system").value.trim();
  const head = system ? [{ role: "system", content: system }] : [];
  return {
    messages: [...head, ...messages],
    temperature: numberIn("temperature", 0.7),
    max_tokens: Math.floor(numberIn("max-tokens", 128)),
  };
}

function numberIn(id, otherwise) {
  const value = Number.parseFloat(byId(id).value);
  return Number.isFinite(value) ? value : otherwise;
}

function tellSettings() {
  const { temperature, max_tokens: maxTokens } = requestBody();
  const system = byId("system").value.trim() ? " · system prompt" : "";
  setText(byId("settings-now"), `temperature ${temperature} · at most ${plural(maxTokens, "token")}${system}`);
}

async function submit(text) {
  if (running !== null || !text.trim()) return;
  messages.push({ role: "user", content: text });
  showTurn(element("article", { class: "turn user" },
    element("p", { class: "who" }, "You"), element("div", { class: "said" }, text)));
  byId("prompt").value = "";
  await answerLast();
}

/** Streams the answer to the last message. A message that got no text is removed from the history. */
async function answerLast() {
  const answer = new AnswerView({
    onSelect: select, colouring: () => colouring.value, numberOf: (row) => numberOf(extent, row),
  });
  const history = messages;
  selected?.select(null);
  selected = null;
  tokenPanel.clear();
  const controller = new AbortController();
  answers.push(answer);
  showTurn(answer.node);
  setRunning(controller);
  let reason = "stopped";
  try {
    for await (const piece of streamChat(requestBody(), controller.signal)) {
      if (history !== messages) return; // a new conversation has started
      showPiece(answer, piece);
      reason = piece.finishReason ?? reason;
    }
    answer.finish(reason);
  } catch (error) {
    if (controller.signal.aborted) answer.finish("stopped");
    else if (error instanceof KeyNeeded && (await askForKey())) return retry(answer);
    else {
      answer.fail(error.message);
      if (error instanceof NoAnswer) connect(); // reports that the server is gone, and when it is back
    }
  } finally {
    if (running === controller) setRunning(null);
  }
  if (history !== messages) return;
  if (answer.text) messages.push({ role: "assistant", content: answer.text });
  else messages.pop();
}

async function retry(answer) {
  answer.node.remove();
  answers = answers.filter((other) => other !== answer);
  connect();
  await answerLast();
}

function showPiece(answer, piece) {
  const turns = byId("turns");
  const isAtEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 60;
  answer.push(piece);
  if (isAtEnd) turns.scrollTop = turns.scrollHeight;
  if (answer.numTokens === 0) return;
  if (extent === null) colouring.setExtent(extentOf(answer.experts));
  if (selected === null || selected === answer) drawSoon(answer);
}

/** Draws once per frame, however many tokens have arrived. */
function drawSoon(answer) {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    if (answers.includes(answer)) answerPanel.show(answer, extent);
  });
}

byId("answer").append(colouring.node);
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit(byId("prompt").value);
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit(byId("prompt").value);
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", clear);
document.addEventListener("themechange", () => answers.forEach((answer) => answer.repaint()));
document.querySelector(".settings").addEventListener("input", tellSettings);
tellSettings();
showWelcome();
connect();
