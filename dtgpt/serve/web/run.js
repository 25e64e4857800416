// A request on its way, and what it has brought.

import { Choice, addProbabilities, beams } from "./answer.js";
import { Problem, complete, score, search, tokenize } from "./api.js";
import { counted } from "./dom.js";
import { NUMBERS_OF_A_CHOICE } from "./fields.js";

const SEEDS = 1e6; // of requests for which none was chosen: short enough to read out

export class Run {
  // body: without prompt and seed. choices: what the request adds to.
  constructor(prompt, body, choices) {
    this.prompt = prompt;
    this.body = { ...body };
    this.choices = choices;
    this.running = false;
    this.problem = null;
    this.abort = new AbortController();
    this.began = this.first = this.ended = 0;
    this.new = 0; // tokens
    this.version = 0; // of `choices`
  }

  static sampling(prompt, body) {
    const choices = Array.from({ length: body.n ?? 1 }, () => new Choice(prompt));
    if (body.echo) for (const choice of choices) choice.lead = [...prompt].length;
    return new Run(prompt, body, choices);
  }

  // Add to a choice that is there. prompt: what to go on from, a text or ids.
  static onward([choice, prompt], body) {
    const { n, echo, ...rest } = body;
    return new Run(prompt, rest, [choice]);
  }

  static searching(prompt, body) {
    const run = new Run(prompt, body, []);
    run.beams = true;
    return run;
  }

  get seconds() {
    return ((this.ended || performance.now()) - this.began) / 1000;
  }

  get seed() {
    return this.body.seed;
  }

  // Ask; call `changed` as often as something has come. Problems are kept in `problem`.
  async go(key, changed) {
    this.running = true;
    this.began = performance.now();
    try {
      await (this.beams ? this.search(key, changed) : this.sample(key, changed));
    } catch (error) {
      if (error.name !== "AbortError") this.problem = error;
    }
    this.ended ||= performance.now();
    this.running = false;
    changed();
  }

  async sample(key, changed) {
    this.body.seed ??= Math.floor(Math.random() * SEEDS);
    const room = await this.room(key);
    const body = { ...this.body, logprobs: NUMBERS_OF_A_CHOICE, return_token_ids: true };
    body.max_tokens = Math.min(body.max_tokens, room);
    if (this.prompt.length) body.prompt = this.prompt; // without one, a new text begins
    for await (const event of complete(body, key, this.abort.signal)) {
      for (const part of event.choices) this.new += this.choices[part.index].add(part);
      if (this.new && !this.first) this.first = performance.now();
      changed();
    }
  }

  async search(key, changed) {
    await this.room(key); // the search itself ends at the last position
    const body = { ...this.body, prompts: [this.prompt] };
    if (!this.prompt) body.add_BOS = true;
    const found = await search(body, key, this.abort.signal);
    if (!found.text.length) throw new Problem("The search found no text.");
    const begin = body.add_BOS ? found.segments[0][0] : "";
    this.choices = beams(found, begin + this.prompt);
    this.ended = performance.now();
    this.countBeams();
    changed();
    try {
      const scored = await score(found.text, NUMBERS_OF_A_CHOICE, key, this.abort.signal);
      addProbabilities(this.choices, found, scored);
      this.countBeams();
    } catch (error) {
      if (error.status !== 400) throw error; // a text that has more tokens than before it was decoded may be too long
    }
  }

  // Return how many tokens the model has positions for. Throws a Problem where there are none.
  async room(key) {
    const isText = typeof this.prompt === "string";
    const { count, max_model_len: positions } = await tokenize(isText ? this.prompt : "", key, this.abort.signal);
    const length = isText ? Math.max(count, 1) : this.prompt.length; // an empty one begins a document with a token
    if (length < positions) return positions - length;
    const what = isText ? "The prompt has" : "The text has";
    const remedy = isText ? "shorten the prompt" : "choose another one of its tokens to go on from";
    const sentence = `${what} ${counted(length, "token")}, and the model has ${counted(positions, "position")}; ${remedy}.`;
    throw new Problem(sentence, { param: isText ? "prompt" : null });
  }

  countBeams() {
    this.new = this.choices.reduce((sum, choice) => sum + choice.tokens.length, 0);
    this.version += 1;
  }

  stop() {
    if (this.running) this.abort.abort();
  }
}
