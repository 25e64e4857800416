// What was asked and what has come of it. Nothing here knows of elements.

const BROKEN = "\ufffd"; // in place of bytes that are not a whole character

// A token is {name, logprob, top: [[name, logprob], ...], start, fixed}: its text goes from character `start` up to the
// next token's. Characters are code points, as the server counts them, and not JavaScript's halves of some of them.
export class Choice {
  constructor(prompt) {
    this.prompt = prompt;
    this.characters = [];
    this.tokens = [];
    this.finish = null; // "stop", "length", or null while more may come
    this.lead = 0; // characters at the beginning that are the prompt's, with its probabilities
    this.base = 0; // where the text of the current request begins
    this.ids = []; // the prompt of the current request, and what came after it
    this.named = 0; // of these, the number in the prompt or with a token in `tokens`
    this.score = null; // of a beam
    this.shared = 0; // characters that a beam has in common with the best one
  }

  get text() {
    return this.characters.join("");
  }

  // The text that a request goes on from.
  get whole() {
    return this.prompt + this.characters.slice(this.lead).join("");
  }

  // Take a choice of an event, whose offsets count from the beginning of that request's text. Return the number of new
  // tokens that are not the prompt's.
  add(part) {
    for (const character of part.text) this.characters.push(character);
    const { tokens = [], token_logprobs: logprobs, top_logprobs: tops, text_offset: offsets } = part.logprobs ?? {};
    tokens.forEach((name, i) => {
      const top = Object.entries(tops?.[i] ?? {}).sort((one, other) => other[1] - one[1]);
      this.tokens.push({ name, logprob: logprobs[i], top, start: this.base + offsets[i], fixed: false });
    });
    this.ids.push(...(part.prompt_token_ids ?? []), ...(part.token_ids ?? []));
    if (part.prompt_token_ids) this.named = this.lead && !this.base ? 0 : part.prompt_token_ids.length;
    this.named += tokens.length;
    this.finish = part.finish_reason ?? this.finish;
    return (offsets ?? []).filter((offset) => this.base + offset >= this.lead).length;
  }

  // The text of token number i, as far as it is known.
  cover(i) {
    const end = i + 1 < this.tokens.length ? this.tokens[i + 1].start : this.characters.length;
    return this.characters.slice(this.tokens[i].start, end).join("");
  }

  get written() {
    return this.tokens.filter((token) => token.start >= this.lead && !token.fixed);
  }

  // e to the mean of -log p: 1 is certainty.
  get perplexity() {
    const known = this.written.map((token) => token.logprob).filter((value) => value !== null);
    return known.length ? Math.exp(-known.reduce((sum, value) => sum + value, 0) / known.length) : null;
  }

  // Return a copy to which another request adds, and what that request goes on from: ids, or a text without them.
  continued() {
    const copy = this.open();
    const prompt = this.ids.length ? this.ids.slice(0, this.named) : this.whole;
    // The next token may complete a character, which the server then sends whole.
    while (this.ids.length && copy.characters.at(-1) === BROKEN) copy.characters.pop();
    copy.base = copy.characters.length;
    return [copy, prompt];
  }

  // Return the same with another token in the place of number i.
  replaced(i, name) {
    const copy = this.open(i);
    const logprob = this.tokens[i].top.find((entry) => entry[0] === name)[1];
    copy.tokens.push({ ...this.tokens[i], name, logprob, fixed: true });
    copy.characters.push(...name);
    copy.base = copy.characters.length;
    return [copy, copy.whole];
  }

  // Return a copy of the first tokens that has not ended.
  open(length = this.tokens.length) {
    const fresh = { finish: null, score: null, shared: 0, ids: [], named: 0 };
    const copy = Object.assign(new Choice(this.prompt), this, fresh);
    const end = length < this.tokens.length ? this.tokens[length].start : this.characters.length;
    copy.characters = this.characters.slice(0, end);
    copy.tokens = this.tokens.slice(0, length);
    return copy;
  }
}

// The beams that a search found, best first. prompt: with the token that was put before it, if any.
export function beams(found, prompt) {
  const best = [...found.text[0]];
  return found.text.map((text, i) => {
    const lead = text.startsWith(prompt) ? [...prompt].length : 0;
    const choice = new Choice(prompt);
    choice.characters = [...text].slice(lead);
    choice.tokens = placed(found.segments[i], text, lead);
    choice.score = found.scores[i];
    choice.finish = "stop";
    choice.shared = i ? Math.max(0, common([...text], best) - lead) : 0;
    return choice;
  });
}

// Give beams the probabilities that the server found for their whole texts, where it cut these into as many tokens.
export function addProbabilities(choices, found, scored) {
  choices.forEach((choice, i) => {
    const whole = new Choice("");
    whole.add({ ...scored[i], finish_reason: null });
    if (whole.tokens.length !== found.segments[i].length || whole.text !== found.text[i]) return;
    const lead = whole.characters.length - choice.characters.length;
    const tokens = whole.tokens.map((token) => ({ ...token, start: token.start - lead }));
    choice.tokens = tokens.filter((token) => token.start >= 0);
  });
}

// Segments as tokens, without those of the prompt; none where a character consists of several tokens.
function placed(segments, text, lead) {
  if (segments.join("") !== text) return [];
  let start = -lead;
  const tokens = segments.map((name) => {
    const token = { name, logprob: null, top: [], start, fixed: false };
    start += [...name].length;
    return token;
  });
  return tokens.filter((token) => token.start >= 0);
}

function common(one, other) {
  let i = 0;
  while (i < one.length && one[i] === other[i]) i += 1;
  return i;
}
