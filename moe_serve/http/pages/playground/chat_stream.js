// Reads one answer of POST /v1/chat/completions piece by piece from its server-sent events.
import { NoAnswer, Refused, send } from "../shared/api.js";

/**
 * Yields {text, reasoning, tokens, experts, drafts, finishReason}; experts is null if the server sends none, and
 * drafts names the drafter of each token that was drafted.
 */
export async function* streamChat(body, signal) {
  const response = await send("v1/chat/completions", {
    body: { ...body, stream: true, return_routed_experts: true },
    signal,
  });
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(500, chunk.error.message);
    for (const choice of chunk.choices ?? []) yield pieceOf(choice);
  }
  throw new NoAnswer("The answer ended early: the server closed the stream before its end.");
}

function pieceOf(choice) {
  const delta = choice.delta ?? {};
  return {
    text: delta.content ?? "",
    reasoning: delta.reasoning_content ?? delta.reasoning ?? "",
    tokens: choice.routed_tokens ?? [],
    experts: choice.routed_experts ?? null,
    drafts: choice.routed_drafts ?? [],
    finishReason: choice.finish_reason ?? null,
  };
}

/** The data of each event; comments (pings) and other fields are skipped. */
export async function* eventsOf(stream) {
  let rest = "";
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new NoAnswer("The answer ended early: the connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {}); // it may already have failed
  }
}
