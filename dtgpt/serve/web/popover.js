// What could have come in the place of a token: shown on hover, tap and arrow keys.

import { find, make, percent, scroller, visible } from "./dom.js";

const NAMELESS = /^(bytes|token_id):/; // the server's names of tokens that are not a text
const PATIENCE = 220; // milliseconds in which the pointer may cross from a token to its box

export class Popover {
  // choose(choice, index, name): go on with another token
  constructor(choose) {
    this.box = find("#popover");
    this.choose = choose;
    this.pinned = false;
    this.box.addEventListener("pointerenter", () => clearTimeout(this.timer));
    this.box.addEventListener("pointerleave", () => this.leave());
    this.box.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("pointerdown", (event) => {
      if (this.card && !this.box.contains(event.target) && !this.card.text.contains(event.target)) this.hide();
    });
    addEventListener("resize", () => this.hide());
  }

  get open() {
    return !this.box.hidden;
  }

  // how: "hover", "click" or "key"
  show(card, index, how) {
    clearTimeout(this.timer);
    if (how === "hover" && this.pinned) return;
    const again = this.card === card && this.index === index;
    if (how === "click" && again && this.pinned) return this.hide();
    this.pinned = how !== "hover";
    if (this.card && this.card !== card) this.card.select(undefined);
    [this.card, this.index] = [card, index];
    card.select(index);
    this.fill(card.choice, index);
    this.box.hidden = false;
    this.place(card.spans[index]);
    if (how === "key") this.speak(card.choice.tokens[index]);
  }

  fill(choice, index) {
    const token = choice.tokens[index];
    const known = token.logprob !== null;
    const rows = token.top.map(([name, logprob]) => this.row(choice, index, name, logprob));
    const rest = 1 - token.top.reduce((sum, [, logprob]) => sum + Math.exp(logprob), 0);
    if (!known) rows.push(make("p", {}, make("code", {}, visible(nameOf(choice, index)))));
    else if (rest > 0.0005) rows.push(make("p", { class: "others" }, "all others", make("span", {}, percent(rest))));
    this.box.replaceChildren(...rows, make("p", { class: "hint" }, hintOf(choice, token)));
  }

  row(choice, index, name, logprob) {
    const probability = Math.exp(logprob);
    const bar = make("span", { class: "bar" });
    bar.style.setProperty("--p", probability);
    const chosen = name === choice.tokens[index].name;
    const label = `${visible(name)}, ${percent(probability)}${chosen ? ", this is what came" : ""}`;
    const onclick = () => {
      const { card } = this;
      this.hide();
      card.text.focus({ preventScroll: true });
      this.choose(choice, index, name);
    };
    const row = make("button", { type: "button", class: chosen ? "chosen" : "", "aria-label": label, onclick });
    row.disabled = NAMELESS.test(name) || choice.tokens[index].start < choice.lead;
    row.append(bar, make("code", {}, visible(name)), make("span", {}, percent(probability)));
    return row;
  }

  // Below the token or, where there is no room, above it. On a phone the style sheet puts the box at the bottom.
  place(span) {
    const rects = span.getClientRects();
    const token = rects[rects.length - 1] ?? span.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.box;
    const below = token.bottom + height + 12 < innerHeight || token.top < height + 12;
    const left = Math.min(Math.max(8, token.left - 12), document.documentElement.clientWidth - width - 8);
    this.box.style.left = `${left + scrollX}px`;
    this.box.style.top = `${(below ? token.bottom + 4 : token.top - height - 4) + scrollY}px`;
    const sheet = getComputedStyle(this.box).position === "fixed";
    const free = innerHeight - (sheet ? this.box.offsetHeight : 0);
    const out = token.bottom > free || token.top < 0;
    if (this.pinned && out) scroller().scrollBy({ top: token.bottom - free / 2, behavior: "instant" });
  }

  speak(token) {
    const others = token.top.filter(([name]) => name !== token.name);
    const told = ([name, logprob]) => `${name} ${logprob === null ? "" : percent(Math.exp(logprob))}`;
    find("#spoken").textContent = `${told([token.name, token.logprob])}; ${others.map(told).join(", ")}`;
  }

  enter() {
    (this.box.querySelector("button:not(.chosen):enabled") ?? this.box.querySelector("button:enabled"))?.focus();
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const buttons = [...this.box.querySelectorAll("button:enabled")];
    const next = buttons.indexOf(document.activeElement) + step;
    event.preventDefault();
    if (next < 0) this.card.text.focus();
    else buttons[Math.min(next, buttons.length - 1)].focus();
  }

  leave() {
    if (!this.pinned) this.timer = setTimeout(() => this.hide(), PATIENCE);
  }

  // Return whether there was something to hide.
  hide() {
    clearTimeout(this.timer);
    if (!this.open) return false;
    const inside = this.box.contains(document.activeElement);
    this.box.hidden = true;
    this.pinned = false;
    this.card.select(undefined);
    if (inside) this.card.text.focus({ preventScroll: true });
    [this.card, this.index] = [null, null];
    return true;
  }
}

function hintOf(choice, token) {
  if (token.logprob === null && choice.score !== null) return "No probability is known.";
  if (token.logprob === null) return "The first token has no probability.";
  if (token.start < choice.lead) return "This token is part of the prompt.";
  return token.fixed ? "You chose this token." : "At temperature 1. Choose one to go on from it.";
}

// What is seen of a token in the text, else what it is called.
function nameOf(choice, index) {
  return choice.cover(index) || choice.tokens[index].name;
}
