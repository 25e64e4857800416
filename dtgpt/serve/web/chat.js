// A conversation: messages that go to the server together, and an answer as it comes.

import { complete } from "./api.js";
import { find } from "./dom.js";

const message = find("#message");
let messages = [];
let abort = null;

function add(role, text) {
  const line = document.createElement("p");
  const name = document.createElement("b");
  const said = document.createElement("span");
  name.textContent = role === "user" ? "You: " : "Model: ";
  said.style.whiteSpace = "pre-wrap";
  said.textContent = text;
  line.append(name, said);
  find("#talk").append(line);
  return said;
}

async function send() {
  const text = message.value.trim();
  if (!text || abort) return;
  const asked = [...messages, { role: "user", content: text }];
  const own = new AbortController();
  abort = own;
  const question = add("user", text);
  const said = add("assistant", "");
  explain(null);
  message.value = "";
  working(true);
  try {
    for await (const event of complete({ messages: asked }, find("#key").value, own.signal, "v1/chat/completions")) {
      said.textContent += event.choices[0]?.delta.content ?? "";
    }
  } catch (error) {
    if (error.name !== "AbortError") explain(error);
  }
  if (own !== abort) return; // a new chat has begun
  abort = null;
  working(false);
  if (said.textContent) {
    messages = [...asked, { role: "assistant", content: said.textContent }];
  } else {
    question.parentElement.remove();
    said.parentElement.remove();
    message.value = text;
  }
}

function explain(problem) {
  find("#problem").hidden = !problem;
  find("#problem").textContent = problem?.message ?? "";
  if (problem?.status === 401) find("#locked").hidden = false;
}

function working(is) {
  find("#send").hidden = is;
  find("#stop").hidden = !is;
  if (!is) message.focus();
}

function reset() {
  abort?.abort();
  abort = null;
  messages = [];
  find("#talk").replaceChildren();
  explain(null);
  working(false);
}

find("#form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
find("#stop").addEventListener("click", () => abort?.abort());
find("#reset").addEventListener("click", reset);
addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
  else if (event.key === "Escape") abort?.abort();
});
message.focus();
