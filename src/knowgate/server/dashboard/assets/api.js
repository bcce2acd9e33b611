// Talks to the server: with the key of this tab, where one is wanted.

const KEY = "knowgate-key";
export class NoKey extends Error {}

export const giveKey = (key) => sessionStorage.setItem(KEY, key);
export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const dropKey = () => sessionStorage.removeItem(KEY);

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function checked(reply) {
  if (reply.status === 401) throw new NoKey("this key is not known here.");
  if (!reply.ok) {
    const said = await reply.json().catch(() => ({}));
    throw new Error(said.error?.message ?? `the server answered ${reply.status}.`);
  }
  return reply;
}

export async function get(path) {
  return (await checked(await fetch(path, { headers: headers() }))).json();
}

export async function post(path, body) {
  return (await checked(await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body) }))).json();
}

// Calls `hear` with each chunk of a streamed answer as it comes.
export async function stream(path, body, hear) {
  const reply = await checked(await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify({ ...body, stream: true }) }));
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) hear(JSON.parse(line.slice(6)));
  }
}
