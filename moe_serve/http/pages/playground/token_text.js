// Assigns parts of the answer's text to its tokens.
//
// Tokens and text arrive together but may not end together: half a character waits for its other
// half, and text that could become a stop string is held back. The text is always right; a token without
// its own text is shown as a mark.

const HALF = "\ufffd";

export class TokenText {
  #open = []; // indices of tokens without text so far
  #text = ""; // text without a token so far
  #strings = [];

  /** Takes a piece; returns [{index, text}] for the tokens whose text is now known. */
  push(tokens, text) {
    for (const token of tokens) {
      this.#open.push(this.#strings.length);
      this.#strings.push(token);
    }
    this.#text += text;
    const settled = [];
    while (this.#open.length && this.#text) {
      const index = this.#open[0];
      const string = this.#strings[index];
      if (string && this.#text.startsWith(string) && !string.includes(HALF)) {
        settled.push({ index, text: string });
        this.#open.shift();
        this.#text = this.#text.slice(string.length);
      } else {
        settled.push(...this.#settleUnlike());
        break;
      }
    }
    return settled;
  }

  /** Assigns text that came without tokens to the last token. */
  get unclaimed() {
    return this.#text;
  }

  /** Assigns the text to all open tokens: the last one shows it, the others show a mark. */
  #settleUnlike() {
    const last = this.#open.at(-1);
    const settled = this.#open.map((index) => ({ index, text: index === last ? this.#text : "" }));
    this.#open = [];
    this.#text = "";
    return settled;
  }
}
