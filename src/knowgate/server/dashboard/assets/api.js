// Client of the server's API. Sends the API key of this tab, if there is one.

const STORAGE_KEY = "knowgate-key";

export class UnauthorizedError extends Error {}

export const saveKey = (key) => sessionStorage.setItem(STORAGE_KEY, key);
export const hasKey = () => sessionStorage.getItem(STORAGE_KEY) !== null;
export const deleteKey = () => sessionStorage.removeItem(STORAGE_KEY);

async function request(path, options = {}) {
  const key = sessionStorage.getItem(STORAGE_KEY);
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { headers, ...options });
  if (response.status === 401) throw new UnauthorizedError("This key is not valid.");
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    if (body.error?.code === "admin_only") throw new UnauthorizedError("This key is not an admin key.");
    throw new Error(body.error?.message ?? `the server answered with status ${response.status}.`);
  }
  return response;
}

export async function get(path) {
  return (await request(path)).json();
}

export async function post(path, body) {
  return (await request(path, { method: "POST", body: JSON.stringify(body) })).json();
}

// Calls onChunk with each chunk of a streamed answer.
export async function postStreaming(path, body, onChunk) {
  const response = await request(path, { method: "POST", body: JSON.stringify({ ...body, stream: true }) });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let incompleteLine = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (incompleteLine + value).split("\n");
    incompleteLine = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) onChunk(JSON.parse(line.slice(6)));
  }
}
