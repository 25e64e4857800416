// Cards: a choice of a run as text, token by token.

import { button, counted, make } from "./dom.js";

const SURPRISE = [0.5, 0.2, 0.05, 0.01, 0.001]; // a token below the i-th is of class s(i + 1)
const LEAD = 280; // characters of the prompt that stand before an only answer,
const SHORT_LEAD = 24; // and before one of several

export class Card {
  // on: {proceed(choice), token(card, index, pinned), leave()}
  constructor(choice, { alone, place, on }) {
    this.choice = choice;
    this.spans = [];
    this.settled = 0; // tokens whose text cannot change any more
    this.on = on;
    this.text = make("div", { class: "text", tabIndex: 0, dir: "auto", role: "group", translate: false });
    this.text.setAttribute("aria-label", `Answer ${place + 1}. Arrow keys show the probabilities of each token`);
    const lead = tail(choice.prompt, alone ? LEAD : SHORT_LEAD);
    if (!choice.lead) this.text.append(make("span", { class: "lead" }, lead));
    this.end = make("span", { class: "caret" });
    this.text.append(this.end);
    this.facts = make("span", { class: "note facts" });
    this.proceed = button("Continue", () => on.proceed(choice));
    this.copy = button("Copy", () => this.copyText(), { title: "Copy prompt and answer" });
    const head = make("div", { class: "row" }, make("span", { class: "place" }, String(place + 1)), scoreOf(choice));
    const foot = make("div", { class: "row" }, this.facts, make("span", { class: "buttons" }, this.proceed, this.copy));
    this.element = make("article", { class: "card" }, alone ? null : head, this.text, foot);
    this.listen();
  }

  listen() {
    this.text.addEventListener("pointerover", (event) => {
      if (event.pointerType !== "mouse") return;
      const index = this.indexOf(event.target);
      if (index >= 0) this.on.token(this, index, "hover");
    });
    this.text.addEventListener("pointerleave", () => this.on.leave());
    this.text.addEventListener("click", (event) => {
      const index = this.indexOf(event.target);
      if (index >= 0 && getSelection().isCollapsed) this.on.token(this, index, "click");
    });
    this.text.addEventListener("keydown", (event) => this.key(event));
  }

  indexOf(element) {
    return element.dataset?.index === undefined ? -1 : Number(element.dataset.index);
  }

  key(event) {
    const last = this.spans.length - 1;
    const now = this.selected ?? -1;
    const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: last }[event.key];
    if (event.altKey || event.ctrlKey || event.metaKey || last < 0) return;
    if (next !== undefined) this.on.token(this, Math.min(Math.max(next, 0), last), "key");
    else if (["Enter", "ArrowDown"].includes(event.key) && this.selected !== undefined) this.on.enter();
    else return;
    event.preventDefault();
  }

  select(index) {
    if (this.selected !== undefined) this.spans[this.selected].classList.remove("selected");
    this.selected = index;
    if (index !== undefined) this.spans[index].classList.add("selected");
  }

  // Show what the choice has by now.
  update(running) {
    const { tokens, characters } = this.choice;
    if (!tokens.length) {
      this.plain ??= this.text.insertBefore(document.createTextNode(""), this.end);
      this.plain.data = this.choice.text;
    }
    for (let i = this.settled; i < tokens.length; i += 1) this.updateToken(i);
    while (this.settled + 1 < tokens.length && tokens[this.settled + 1].start <= characters.length) this.settled += 1;
    this.end.hidden = !running || this.choice.finish !== null;
    this.proceed.hidden = running || this.choice.finish === "stop";
    this.copy.hidden = running;
    this.facts.textContent = this.describe(running);
  }

  updateToken(i) {
    const token = this.choice.tokens[i];
    const text = this.choice.cover(i);
    if (i === this.spans.length) {
      const span = make("span", { class: classOf(token, this.choice) });
      span.dataset.index = i;
      this.spans.push(span);
      this.text.insertBefore(span, this.end);
    }
    if (this.spans[i].textContent !== text) this.spans[i].textContent = text;
    const ends = this.choice.finish === "stop" && i === this.choice.tokens.length - 1 && text === "";
    this.spans[i].classList.toggle("end", ends);
  }

  describe(running) {
    const { choice } = this;
    const parts = [counted(choice.written.length, "token")];
    if (choice.perplexity !== null) parts.push(`perplexity ${choice.perplexity.toPrecision(3)}`);
    if (!running && choice.score === null && choice.finish !== "length") {
      parts.push(choice.finish === "stop" ? "ended by itself" : "stopped");
    }
    return choice.tokens.length || choice.text ? parts.join(" · ") : running ? "" : "no text";
  }

  async copyText() {
    await copy(this.choice.whole);
    this.copy.textContent = "Copied";
    setTimeout(() => (this.copy.textContent = "Copy"), 1500);
  }
}

function classOf(token, choice) {
  const words = ["t"];
  if (token.logprob !== null) words.push(`s${SURPRISE.filter((bound) => Math.exp(token.logprob) < bound).length}`);
  if (token.fixed) words.push("fixed");
  if (token.start < choice.lead) words.push("lead");
  if (token.start < choice.shared) words.push("shared");
  return words.join(" ");
}

// The end of a long prompt, from the beginning of a word.
function tail(prompt, most) {
  if (prompt.length <= most) return prompt;
  const end = prompt.slice(-most);
  return `… ${end.slice(end.search(/\s/) + 1)}`;
}

function scoreOf(choice) {
  if (choice.score === null) return null;
  const title = "Score: sum of log-probabilities / length to the power of the length penalty";
  return make("span", { class: "note", title }, choice.score.toFixed(3).replace("-", "−"));
}

// navigator.clipboard needs https or this machine; a selection works everywhere.
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).catch(() => selected(text));
  return selected(text);
}

function selected(text) {
  const area = make("textarea", { class: "hidden", value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
