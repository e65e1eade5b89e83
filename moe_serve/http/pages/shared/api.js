// Requests to the server that served this page, with the API key if one was given.
import { currentKey } from "./key.js";

export class KeyNeeded extends Error {}
export class NoAnswer extends Error {}

/** An error answer: its status and the server's message. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** `path` is relative to the server's root, without a leading slash, so it works behind a proxy's prefix. */
export function address(path) {
  return new URL(`../../../${path}`, import.meta.url);
}

export async function send(path, { body = null, signal = null } = {}) {
  const headers = { Accept: "application/json" };
  const key = currentKey();
  if (key) headers.Authorization = `Bearer ${asBytes(key)}`;
  if (body !== null) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(address(path), {
      method: body === null ? "GET" : "POST",
      headers,
      body: body === null ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "same-origin",
    });
  } catch (error) {
    if (signal?.aborted && signal.reason?.name !== "TimeoutError") throw error;
    throw new NoAnswer("The server does not answer.");
  }
  if (response.ok) return response;
  throw await refusal(response);
}

export async function getJson(path, timeoutMs) {
  const response = await send(path, { signal: AbortSignal.timeout(timeoutMs) });
  try {
    return await response.json();
  } catch {
    throw new NoAnswer("The server's answer ended early.");
  }
}

/** Encodes text for a header, which takes bytes: UTF-8, one character per byte. */
function asBytes(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

async function refusal(response) {
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // not our error envelope, perhaps a proxy's page
  }
  return response.status === 401 ? new KeyNeeded(message) : new Refused(response.status, message);
}
