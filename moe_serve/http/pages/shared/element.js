// Makes elements from data. Data is always inserted as text: nothing here parses markup.
const SVG = "http://www.w3.org/2000/svg";

/** `element("p", {class: "muted"}, "text", child)`; a property that is a function becomes an event listener. */
export function element(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svgElement(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Sets the text only if it differs, so that an unchanged page needs no new layout. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Returns the value of a colour variable of base.css. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
