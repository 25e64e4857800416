// Elements. All text goes through textContent: nothing that a model writes becomes markup.

export const find = (selector) => document.querySelector(selector);

// What scrolls: on a phone the body, which ends above the buttons.
export function scroller() {
  const isBody = getComputedStyle(document.body).overflowY === "auto";
  return isBody ? document.body : document.documentElement;
}

// make("p", { class: "note", hidden: true }, "text", element, ...)
export function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element && key !== "list") element[key] = value;
    else if (value !== undefined && value !== null) element.setAttribute(key === "class" ? "class" : key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function button(label, onclick, properties = {}) {
  return make("button", { type: "button", class: "quiet", onclick, ...properties }, label);
}

export function counted(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

// Blanks and line ends of a token, made visible.
export function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍") || "∅";
}

export function percent(probability) {
  if (probability > 0.9995) return ">99.9 %";
  if (probability < 0.0001) return "<0.01 %";
  return `${(100 * probability).toFixed(probability < 0.01 ? 2 : 1)} %`;
}
