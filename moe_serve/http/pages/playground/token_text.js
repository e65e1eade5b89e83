// Which part of the answer's text each token stands for.
//
// Tokens and text come together but need not end together: half a character waits for its other
// half, and what could become a stop string is held back. The text is the truth; a token without
// text of its own is shown as a mark.

const HALF = "\ufffd";

export class TokenText {
  #open = []; // indices of tokens that have no text yet
  #text = ""; // text that no token has yet
  #strings = [];

  /** Takes a piece; returns [{index, text}] for the tokens that are settled now. */
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

  /** Text that came without tokens: the last token takes it. */
  get unclaimed() {
    return this.#text;
  }

  /** All open tokens together are the text: the last one shows it, the others a mark. */
  #settleUnlike() {
    const last = this.#open.at(-1);
    const settled = this.#open.map((index) => ({ index, text: index === last ? this.#text : "" }));
    this.#open = [];
    this.#text = "";
    return settled;
  }
}
