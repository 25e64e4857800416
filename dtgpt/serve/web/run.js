// A request on its way, and what it has brought.

import { Choice, beams, withProbabilities } from "./answer.js";
import { complete, score, search } from "./api.js";
import { NUMBERS_OF_A_CHOICE } from "./fields.js";

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
  }

  static sampling(prompt, body) {
    const choices = Array.from({ length: body.n ?? 1 }, () => new Choice(prompt));
    if (body.echo) for (const choice of choices) choice.lead = [...prompt].length;
    return new Run(prompt, body, choices);
  }

  // Go on from a choice that is there.
  static onward(choice, body) {
    const { n, echo, ...rest } = body;
    return new Run(choice.prompt, rest, [choice]);
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
    this.ended = performance.now();
    this.running = false;
    changed();
  }

  async sample(key, changed) {
    this.body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
    const prompt = this.choices.length === 1 && this.choices[0].base ? this.choices[0].whole : this.prompt;
    const body = { ...this.body, logprobs: NUMBERS_OF_A_CHOICE };
    if (prompt) body.prompt = prompt; // without one, a new text begins
    const before = this.count();
    for await (const event of complete(body, key, this.abort.signal)) {
      for (const part of event.choices) this.choices[part.index].add(part);
      this.new = this.count() - before;
      if (this.new && !this.first) this.first = performance.now();
      changed();
    }
  }

  async search(key, changed) {
    const body = { ...this.body, prompts: [this.prompt] };
    if (!this.prompt) body.add_BOS = true;
    const found = await search(body, key, this.abort.signal);
    this.choices = beams(found, this.prompt);
    this.new = this.count();
    this.ended = performance.now();
    changed();
    const scored = await score(found.text, NUMBERS_OF_A_CHOICE, key, this.abort.signal);
    withProbabilities(this.choices, scored);
  }

  count() {
    return this.choices.reduce((sum, choice) => sum + choice.written.length, 0);
  }

  stop() {
    this.abort.abort();
  }
}
