// The settings beside the prompt. They are kept in the browser and go into a link; the API key does neither.

import { FIELDS, GROUPS, parse } from "./fields.js";
import { button, counted, find, make } from "./dom.js";

const STORE = "dtgpt.settings";
const KEY = "dtgpt.key";

export class Settings {
  constructor(changed) {
    this.controls = new Map(); // name of a field -> its inputs
    this.groups = [];
    this.mode = "sample";
    this.changed = changed;
    this.build(find("#fields"));
    this.restore();
  }

  build(place) {
    place.append(this.modes());
    for (const group of GROUPS) {
      const rows = FIELDS.filter((field) => field.group === group.name).map((field) => this.row(field));
      if (!group.title) {
        place.append(make("div", { class: "group" }, ...rows));
        continue;
      }
      const count = make("span", { class: "note" });
      const box = make("details", { class: "group" }, make("summary", {}, group.title, " ", count), ...rows);
      this.groups.push({ name: group.name, box, count });
      place.append(box);
    }
    this.reset = button("Reset settings", () => this.clear());
    place.append(this.reset);
  }

  modes() {
    const choice = (value, label) => {
      const input = make("input", { type: "radio", name: "mode", value, onchange: () => this.choose(value) });
      this.controls.set(`mode:${value}`, { input });
      return make("label", {}, input, make("span", {}, label));
    };
    const box = make("fieldset", { class: "modes" }, choice("sample", "Sampling"), choice("beams", "Beam search"));
    box.setAttribute("aria-label", "How the text goes on");
    return box;
  }

  row(field) {
    const id = `field-${field.name}`;
    const input = control(field, id);
    const row = make("div", { class: `field ${field.kind}` });
    const label = make("label", { htmlFor: id }, field.label);
    input.addEventListener("input", () => this.update(field));
    if (field.kind === "number") input.addEventListener("keydown", (event) => this.step(event, field));
    let slider = null;
    if (field.slide) {
      slider = make("input", { type: "range", min: field.min, max: field.slide, step: field.step, tabIndex: -1 });
      slider.setAttribute("aria-hidden", "true"); // the number beside it has the same value
      slider.addEventListener("input", () => {
        input.value = slider.value;
        this.update(field);
      });
    }
    row.append(...(field.kind === "switch" ? [input, label] : [label, input]));
    if (slider) row.append(slider);
    if (field.hint) {
      const hint = make("p", { class: "hint", id: `${id}-hint` }, field.hint);
      input.setAttribute("aria-describedby", hint.id);
      row.append(hint);
    }
    this.controls.set(field.name, { field, input, slider, row });
    return row;
  }

  // Arrow keys in a number.
  step(event, field) {
    const by = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    const { step, min = -Infinity, max = Infinity } = field;
    const value = Number(event.target.value || field.initial) + by * step;
    if (!by || !Number.isFinite(value)) return;
    event.preventDefault();
    event.target.value = String(Number(Math.min(Math.max(value, min), max).toFixed(6)));
    this.update(field);
  }

  fields() {
    return [...this.controls.values()].filter((control) => control.field);
  }

  applies(field) {
    return !field.mode || field.mode === this.mode;
  }

  value(name) {
    const { field, input } = this.controls.get(name);
    return field.kind === "switch" ? input.checked : input.value;
  }

  set(name, value) {
    const { field, input } = this.controls.get(name);
    if (field.kind === "switch") input.checked = value === true || value === "true";
    else input.value = value;
    this.show(field);
  }

  isInitial(field) {
    const value = this.value(field.name);
    if (field.kind !== "number" || field.initial === "") return value === field.initial;
    return value === "" || Number(value) === field.initial;
  }

  // Return the keys of a request, or throw a RangeError whose message is a sentence. `route`: "v1" or "api".
  request(route) {
    const body = {};
    for (const { field } of this.fields()) {
      const key = field[route];
      if (!key || !this.applies(field) || (this.isInitial(field) && !field.always)) continue;
      try {
        body[key] = parse(field, this.value(field.name));
      } catch (error) {
        throw Object.assign(error, { param: field.name });
      }
    }
    return body;
  }

  // Mark the field that a problem is about, and show it: that of its key, or else of a key that its sentence names.
  mark({ param, message }) {
    this.unmark();
    const fields = this.fields().filter(({ field }) => this.applies(field));
    const of = (is) => fields.find((control) => keysOf(control.field).some(is));
    const found = of((key) => key === param) ?? of((key) => named(key).test(message));
    if (!found) return;
    found.input.setAttribute("aria-invalid", "true");
    for (let box = found.row.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
    found.input.focus();
  }

  unmark() {
    for (const { input } of this.fields()) input.removeAttribute("aria-invalid");
  }

  choose(mode) {
    this.mode = mode === "beams" ? "beams" : "sample";
    this.controls.get(`mode:${this.mode}`).input.checked = true;
    for (const { field, row } of this.fields()) row.hidden = !this.applies(field);
    this.save();
  }

  update(field) {
    this.unmark();
    this.show(field);
    this.save();
  }

  show(field) {
    const { input, slider, row } = this.controls.get(field.name);
    if (slider) slider.value = input.value === "" ? field.initial : input.value;
    row.classList.toggle("set", field.kind !== "secret" && !this.isInitial(field));
  }

  // A server's sentence, with the labels of fields in place of its keys.
  worded(message) {
    const fields = this.fields().filter(({ field }) => this.applies(field));
    const keys = fields.flatMap(({ field }) => keysOf(field).map((key) => [key, field.label]));
    return keys.reduce((text, [key, label]) => text.replace(named(key), (_, end) => label + end.replace("=", " ")), message);
  }

  get length() {
    const { field, input } = this.controls.get("max_tokens");
    return Number(input.value) || field.initial;
  }

  // The model has this many positions.
  limit(positions) {
    const { field, slider } = this.controls.get("max_tokens");
    const untouched = this.isInitial(field);
    slider.max = positions;
    field.initial = Math.min(field.initial, positions);
    if (untouched) this.set(field.name, field.initial);
    this.summarize();
  }

  kept() {
    return { mode: this.mode, ...Object.fromEntries(this.changes().map(({ name }) => [name, this.value(name)])) };
  }

  // Fields that are not at their initial values.
  changes() {
    return this.fields().map(({ field }) => field).filter((field) => field.kind !== "secret" && !this.isInitial(field));
  }

  save() {
    remember(localStorage, STORE, JSON.stringify(this.kept()));
    remember(sessionStorage, KEY, this.value("key"));
    this.summarize();
    this.changed();
  }

  summarize() {
    const set = this.changes().filter((field) => this.applies(field));
    for (const { name, box, count } of this.groups) {
      const number = set.filter((field) => field.group === name).length;
      count.textContent = number ? String(number) : "";
      box.hidden = !this.fields().some(({ field }) => field.group === name && this.applies(field));
    }
    this.reset.hidden = !set.length;
    const worded = ({ kind, label, name }) => label + (kind === "number" ? ` ${this.value(name)}` : "");
    const words = set.slice(0, 3).map(worded);
    if (set.length > 3) words.push(`${set.length - 3} more`);
    find("#summary").textContent = words.join(", ") || counted(this.length, "token");
  }

  clear() {
    for (const { field } of this.fields()) if (field.kind !== "secret") this.set(field.name, field.initial);
    this.unmark();
    this.save();
  }

  // From the link, else from the browser.
  restore() {
    for (const { field } of this.fields()) this.set(field.name, field.initial);
    this.set("key", recall(sessionStorage, KEY) ?? "");
    let kept = {};
    try {
      kept = JSON.parse(recall(localStorage, STORE) ?? "{}") ?? {};
    } catch {
      // not ours
    }
    this.take(kept);
  }

  take(kept) {
    for (const { field } of this.fields()) {
      if (field.kind === "secret") continue;
      const value = Object.hasOwn(kept, field.name) ? kept[field.name] : field.initial;
      this.set(field.name, value);
    }
    for (const { name, box } of this.groups) box.open = this.changes().some((field) => field.group === name);
    this.choose(kept.mode);
  }
}

const keysOf = (field) => [...new Set([field.name, field.v1, field.api].filter(Boolean))];

// Where a sentence names a key: words such as "stop" and "n" may be others, unless a value or a rule follows.
function named(key) {
  return new RegExp(`\\b${key}(${key.includes("_") ? "=|\\b" : "=| must| cannot"})`, "g");
}

function control(field, id) {
  const shared = { id, name: field.name, spellcheck: false, placeholder: field.example ?? "" };
  switch (field.kind) {
    case "switch":
      return make("input", { ...shared, type: "checkbox" });
    case "lines":
      return make("textarea", { ...shared, rows: 2 });
    case "secret":
      return make("input", { ...shared, type: "password", autocomplete: "off" });
    case "number": // as a text: what is not a number is shown and explained, where type=number would drop it
      shared.inputMode = field.step === 1 ? "numeric" : "decimal";
      shared.placeholder = String(field.initial);
  }
  return make("input", { ...shared, type: "text" });
}

export function remember(store, name, value) {
  try {
    store.setItem(name, value);
  } catch {
    // a browser that keeps nothing
  }
}

export function recall(store, name) {
  try {
    return store.getItem(name);
  } catch {
    return null;
  }
}
