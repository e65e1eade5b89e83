// Makes invisible characters of a text visible: characters without a glyph, and those that reorder
// their neighbours, are written out. Line breaks, tabs and joiners (which scripts need) stay.

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;

export function visible(text) {
  return text.replace(HIDDEN, (character) =>
    `⟨U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}
