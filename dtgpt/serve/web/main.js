// The page: from buttons and keys to runs, and from runs to what is shown.

import { models, talks, tokenize } from "./api.js";
import { button, counted, find, scroller } from "./dom.js";
import { Popover } from "./popover.js";
import { Run } from "./run.js";
import { Settings, recall, remember } from "./settings.js";
import { Card, copy } from "./view.js";

const PROMPT = "dtgpt.prompt";
const THEME = "dtgpt.theme";
const RUNS = 50; // that can be gone back to
const EXAMPLES = ["Once upon a time", "The capital of France is", "def fibonacci(n):"];
const wide = matchMedia("(min-width: 60rem)");
const isMac = /Mac|iPhone|iPad/.test(navigator.platform);

let timer; // of counting the prompt's tokens
let counting;
let model = null;
let told = null; // the problem that is shown
const prompt = find("#prompt");
const settings = new Settings(() => countSoon());
const popover = new Popover((choice, index, name) => onward(choice.replaced(index, name)));
const runs = [];
let shown = -1; // place in runs
let cards = [];
let built = null; // version of the run that the cards are for

const current = () => runs[shown];
const busy = () => Boolean(current()?.running);

function generate() {
  try {
    if (settings.mode === "beams") start(Run.searching(prompt.value, settings.request("api")));
    else start(Run.sampling(prompt.value, settings.request("v1")));
  } catch (error) {
    explain(error);
  }
}

function onward(from) {
  try {
    start(Run.onward(from, settings.request("v1")));
  } catch (error) {
    explain(error);
  }
}

async function start(run) {
  current()?.stop();
  popover.hide();
  explain(null);
  runs.push(run);
  if (runs.length > RUNS) runs.shift();
  if (!run.beams && model) run.body.model = model.id;
  const done = run.go(settings.value("key"), () => refreshSoon(run));
  show(runs.length - 1);
  reveal();
  await done;
  refresh(run);
  if (run === current()) {
    explain(run.problem);
    find("#spoken").textContent = run.problem ? "" : `Done, ${counted(run.new, "token")}`;
  }
  if (!run.choices.some((choice) => choice.characters.length || choice.tokens.length)) drop(run);
  if (!model && !run.problem) showModel();
}

// Bring the answer's place into view: on a phone, without the keyboard and the settings.
function reveal() {
  if (matchMedia("(hover: none)").matches) document.activeElement?.blur();
  if (!wide.matches) find("#settings").open = false;
  const { top } = find("#results").getBoundingClientRect();
  if (top < 0 || top > 0.7 * innerHeight) find("#results").scrollIntoView({ block: "start" });
}

// A run that brought nothing is not one to go back to.
function drop(run) {
  const place = runs.indexOf(run);
  if (place < 0) return;
  runs.splice(place, 1);
  if (shown >= place) show(Math.min(shown, runs.length) - 1);
}

function stop() {
  current()?.stop();
}

function show(place) {
  shown = Math.max(Math.min(place, runs.length - 1), -1);
  popover.hide();
  const run = current();
  cards = [];
  built = null;
  find("#answers").replaceChildren();
  find("#welcome").hidden = Boolean(run);
  find("#results-head").hidden = !run;
  if (run) refresh(run);
}

const waiting = new Set();
function refreshSoon(run) {
  if (waiting.has(run)) return;
  waiting.add(run);
  requestAnimationFrame(() => {
    waiting.delete(run);
    refresh(run);
  });
}

function refresh(run) {
  if (run !== current()) return;
  const answers = find("#answers");
  const { scrollTop, clientHeight, scrollHeight } = scroller();
  const follows = run.running && scrollTop + clientHeight >= scrollHeight - 8 && cards.length;
  if (built !== run.version) build(run, answers);
  for (const card of cards) card.update(run.running && !run.beams);
  answers.setAttribute("aria-busy", String(run.running));
  find("#legend").hidden = !cards.some((card) => card.choice.tokens.some((token) => token.logprob !== null));
  find("#results-label").textContent = run.beams ? "Beams" : cards.length > 1 ? "Answers" : "Answer";
  status(run);
  buttons(run);
  if (follows) scroller().scrollTo({ top: scroller().scrollHeight, behavior: "instant" });
}

function build(run, answers) {
  popover.hide();
  const alone = run.choices.length === 1 && !run.beams;
  const on = {
    proceed: (choice) => onward(choice.continued()),
    token: (card, index, how) => popover.show(card, index, how),
    leave: () => popover.leave(),
    enter: () => popover.enter(),
  };
  cards = run.choices.map((choice, place) => new Card(choice, { alone, place, on }));
  built = run.version;
  answers.classList.toggle("several", !alone);
  answers.classList.toggle("two-by-two", cards.length === 4);
  answers.replaceChildren(...cards.map((card) => card.element));
}

function status(run) {
  const parts = [];
  if (run.new) {
    parts.push(`${counted(run.new, "token")} in ${run.seconds.toFixed(2)} s`);
    const since = run.first || run.began;
    const rate = ((run.ended || performance.now()) - since) / 1000;
    if (!run.beams && run.new > 8 && rate > 0.05) parts.push(`${counted(Math.round(run.new / rate), "token")}/s`);
  } else if (run.running) {
    parts.push(run.beams ? "Searching" : "Waiting");
  }
  find("#status").textContent = parts.join(" · ");
}

function buttons(run) {
  const had = document.activeElement;
  find("#generate").hidden = run.running;
  find("#stop").hidden = !run.running;
  if (had === find("#generate") && run.running) find("#stop").focus();
  if (had === find("#stop") && !run.running) find("#generate").focus();
  find("#seed").hidden = run.seed === undefined || settings.value("seed") === String(run.seed);
  find("#seed").textContent = `Seed ${run.seed}`;
  find("#place").textContent = `${shown + 1} of ${runs.length}`;
  find("#history").hidden = runs.length < 2;
  find("#older").disabled = run.running || shown === 0;
  find("#newer").disabled = run.running || shown === runs.length - 1;
}

// Show a problem as a sentence, beside the field that it is about.
function explain(problem) {
  told = problem;
  const place = find("#problem");
  place.hidden = !problem;
  place.textContent = problem ? settings.worded(problem.message) : "";
  prompt.removeAttribute("aria-invalid");
  settings.unmark();
  if (!problem) return;
  settings.mark(problem.status === 401 ? { param: "key" } : problem);
  if (problem.param === "prompt") {
    prompt.setAttribute("aria-invalid", "true");
    prompt.focus();
  }
  place.scrollIntoView({ block: "nearest" });
}

async function showModel() {
  const before = told;
  try {
    model = await models(settings.value("key"));
  } catch (error) {
    explain(error);
    return;
  }
  if (told === before) explain(null); // otherwise it is of a run that failed meanwhile
  const { id, max_model_len: positions } = model;
  find("#model").textContent = id;
  find("#positions").textContent = positions ? `, ${counted(positions, "position")}` : "";
  document.title = `${id} – dtgpt`;
  if (positions) settings.limit(positions);
  countSoon();
  find("#chat").hidden = !(await talks(settings.value("key")).catch(() => false));
}

function countSoon() {
  clearTimeout(timer);
  timer = setTimeout(async () => {
    counting?.abort();
    counting = new AbortController();
    const place = find("#count");
    if (!prompt.value || !model) return void (place.textContent = "");
    try {
      const { count, max_model_len: positions } = await tokenize(prompt.value, settings.value("key"), counting.signal);
      const free = positions - count;
      const room = free < settings.length ? `, room for ${Math.max(free, 0)}` : "";
      place.textContent = counted(count, "token") + room;
    } catch (error) {
      if (error.name !== "AbortError") place.textContent = ""; // a nicety: the answer will say what is wrong
    }
  }, 300);
}

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, innerHeight / 2)}px`;
}

function typed() {
  prompt.removeAttribute("aria-invalid");
  remember(sessionStorage, PROMPT, prompt.value);
  fit();
  countSoon();
}

function write(text) {
  prompt.value = text;
  typed();
}

function example(text) {
  write(text);
  prompt.focus();
}

async function copyLink() {
  const words = new URLSearchParams({ prompt: prompt.value, ...settings.kept() });
  const address = new URL(location.href);
  address.hash = words.toString();
  history.replaceState(null, "", address);
  await copy(address.href);
  find("#link").textContent = "Copied";
  setTimeout(() => (find("#link").textContent = "Copy link"), 1500);
}

function followLink() {
  if (location.hash.length < 2) return;
  const { prompt: text, ...kept } = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  settings.take(kept);
  if (text !== undefined) write(text);
}

function changeTheme() {
  const dark = getComputedStyle(document.documentElement).getPropertyValue("--is-dark").trim() === "1";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  remember(localStorage, THEME, document.documentElement.dataset.theme);
}

function keys(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    generate();
  } else if (event.key === "Escape" && !event.isComposing) {
    if (!popover.hide()) stop();
  }
}

find("#form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!busy()) generate();
});
find("#stop").addEventListener("click", stop);
find("#older").addEventListener("click", () => show(shown - 1));
find("#newer").addEventListener("click", () => show(shown + 1));
find("#seed").addEventListener("click", () => {
  settings.set("seed", String(current().seed));
  settings.save();
  buttons(current());
});
find("#link").addEventListener("click", copyLink);
find("#theme").addEventListener("click", changeTheme);
prompt.addEventListener("input", typed);
addEventListener("keydown", keys);
find("#field-key").addEventListener("change", () => model ?? showModel());
addEventListener("hashchange", followLink);
addEventListener("pagehide", stop);
find("#generate kbd").textContent = isMac ? "⌘↵" : "Ctrl ↵";
find("#examples").append(...EXAMPLES.map((text) => button(text, () => example(text), { class: "example" })));

const arrange = () => (find("#settings").open = wide.matches);
wide.addEventListener("change", arrange);
arrange();
write(recall(sessionStorage, PROMPT) ?? "");
followLink();
if (wide.matches) prompt.focus();
showModel();
