// The server's routes. Every failure is a Problem, whose message is a sentence for the user.

export class Problem extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

const UNREACHABLE = "The server does not answer. Is dtgpt serve still running at this address?";
const NO_KEY = "This server needs an API key; type it in under Server.";
const WRONG_KEY = "The server does not accept this API key; type it in again.";
const BROKEN_OFF = "The connection ended before the answer did. Continue goes on from the text so far.";

async function ask(path, { method = "POST", body, key, signal } = {}) {
  const headers = {};
  if (body) headers["Content-Type"] = "application/json";
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    // a key of characters that a header cannot have is not sent at all
    throw /[^\x20-\x7e]/.test(key ?? "") ? new Problem(WRONG_KEY, { status: 401 }) : new Problem(UNREACHABLE);
  }
  if (response.status === 401) throw new Problem(key ? WRONG_KEY : NO_KEY, { status: 401 });
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function problemOf(response) {
  let message = `The server answered with status ${response.status}.`;
  let param = null;
  try {
    const body = await response.json();
    message = body.error?.message ?? body.message ?? message;
    param = body.error?.param ?? null;
  } catch {
    // not JSON: a proxy's page, say
  }
  const wait = response.headers.get("retry-after");
  if (response.status === 429 || response.status === 503) {
    message = `${sentence(message)} Try again${wait ? ` in ${wait} s` : " in a moment"}.`;
  }
  return new Problem(sentence(message), { status: response.status, param });
}

// With a capital, except of a key, and a full stop.
function sentence(text) {
  const whole = String(text).trim().replace(/^[a-z](?=[a-z]* )/, (letter) => letter.toUpperCase());
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

export async function models(key) {
  const body = await (await ask("v1/models", { method: "GET", key })).json();
  return body.data[0];
}

// Return the tokens of a text, as a prompt has them, and the model's positions: {count, max_model_len, ...}.
export async function tokenize(text, key, signal) {
  return (await ask("tokenize", { body: { prompt: text }, key, signal })).json();
}

// Return whether the tokenizer has a chat template.
export async function talks(key) {
  return Boolean((await (await ask("tokenizer_info", { method: "GET", key })).json()).chat_template);
}

// Yield the events of a streamed completion, of a text or at the path of chats.
export async function* complete(body, key, signal, path = "v1/completions") {
  const response = await ask(path, { body: { ...body, stream: true }, key, signal });
  let done = false;
  for await (const data of serverSentEvents(response.body)) {
    done = data === "[DONE]";
    if (done) continue; // to the end of the connection, which can then be used again
    const event = JSON.parse(data);
    if (event.error) throw new Problem(sentence(event.error.message), { param: event.error.param });
    yield event;
  }
  if (!done) throw new Problem(BROKEN_OFF);
}

async function* serverSentEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : new Problem(BROKEN_OFF);
    }
    if (part.done) return;
    const lines = (rest + part.value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

// Return the log-probabilities of whole texts, a list of choices as of a completion.
export async function score(prompts, logprobs, key, signal) {
  const body = { prompt: prompts, max_tokens: 0, echo: true, logprobs };
  return (await (await ask("v1/completions", { body, key, signal })).json()).choices;
}

// Search with beams: {scores, segments, text}.
export async function search(body, key, signal) {
  return (await ask("api", { method: "PUT", body, key, signal })).json();
}
