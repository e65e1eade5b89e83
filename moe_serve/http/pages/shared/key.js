// Asks for the API key once and keeps it for this tab only.
import { element } from "./element.js";

const STORE = "moe-serve-key";
let key = read();
let asking = null;

export function currentKey() {
  return key;
}

/** Resolves to true once a key was entered, to false if the dialog was closed without one. */
export function askForKey() {
  asking ??= openDialog().finally(() => {
    asking = null;
  });
  return asking;
}

function openDialog() {
  return new Promise((resolve) => {
    const input = element("input", {
      type: "password", id: "api-key", autocomplete: "off", required: true, spellcheck: "false",
    });
    const text = key
      ? "The server did not accept that key. Enter another one."
      : "This server requires an API key to show its state. The key is kept in this tab until you close it.";
    const form = element("form", {},
      element("h2", { id: "key-title" }, "API key"),
      element("p", {}, text),
      element("label", { for: "api-key", class: "hidden" }, "API key"),
      input,
      element("div", { class: "row" },
        element("button", { type: "button", click: () => dialog.close() }, "Cancel"),
        element("button", { type: "submit", class: "main" }, "Use this key")));
    const dialog = element("dialog", { "aria-labelledby": "key-title" }, form);
    let isEntered = false;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      store(input.value.trim());
      isEntered = true;
      dialog.close();
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(isEntered);
    });
    document.body.append(dialog);
    dialog.showModal();
    input.focus();
  });
}

function read() {
  try {
    return sessionStorage.getItem(STORE) ?? "";
  } catch {
    return "";
  }
}

function store(value) {
  key = value;
  try {
    sessionStorage.setItem(STORE, value);
  } catch {
    // storage is disabled: the key is kept as long as the page
  }
}
