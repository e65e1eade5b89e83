// The tooltip of the page. Screen readers get the same words when the keyboard moves.
import { element, setText } from "./element.js";

const GAP = 12;
let box = null;
let announcer = null;

/** Shows `lines` beside the point (in the window's coordinates). */
export function showTooltip(lines, x, y) {
  if (box === null) {
    box = element("div", { class: "tooltip", role: "tooltip" });
    document.body.append(box);
  }
  box.hidden = false;
  setText(box, lines.join("\n"));
  const { width, height } = box.getBoundingClientRect();
  const hasRoomRight = x + GAP + width <= window.innerWidth - 8;
  const left = hasRoomRight ? x + GAP : x - GAP - width;
  const hasRoomBelow = y + GAP + height <= window.innerHeight - 8;
  const top = hasRoomBelow ? y + GAP : y - GAP - height;
  box.style.left = `${Math.min(Math.max(8, left), Math.max(8, window.innerWidth - width - 8))}px`;
  box.style.top = `${Math.max(8, top)}px`;
}

export function hideTooltip() {
  if (box !== null) box.hidden = true;
}

export function announce(text) {
  if (announcer === null) {
    announcer = element("div", { class: "hidden", "aria-live": "polite" });
    document.body.append(announcer);
  }
  setText(announcer, text);
}
