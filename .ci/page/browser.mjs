// Headless Chromium, by its own protocol (CDP): one process, tabs in it, and what happens in them.
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import WebSocket from "ws";

const PATIENCE_MS = 30_000;

export const until = async (what, ask, patience = PATIENCE_MS) => {
  const end = Date.now() + patience;
  for (;;) {
    const found = await ask();
    if (found) return found;
    if (Date.now() > end) throw new Error(`waited ${patience} ms in vain until ${what}`);
    await new Promise((done) => setTimeout(done, 50));
  }
};

export const open = async (program) => {
  const folder = mkdtempSync(join(tmpdir(), "page-check-"));
  const child = spawn(program, [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
    "--remote-debugging-port=0", `--user-data-dir=${folder}`, "about:blank",
  ], { stdio: ["ignore", "ignore", "pipe"] });
  let said = "";
  child.stderr.on("data", (text) => { said += text; });
  const address = await until("Chromium listens", () => {
    if (child.exitCode !== null) throw new Error(`Chromium ended: ${said.slice(-2000)}`);
    return said.match(/DevTools listening on (ws:\S+)/)?.[1];
  });
  const socket = new WebSocket(address, { perMessageDeflate: false });
  await new Promise((done, fail) => { socket.once("open", done); socket.once("error", fail); });
  const waiting = new Map(), listeners = new Map();
  let last = 0;
  socket.on("message", (text) => {
    const told = JSON.parse(text);
    if (told.id) {
      const { done, fail, method } = waiting.get(told.id);
      waiting.delete(told.id);
      if (told.error) fail(new Error(`${method}: ${told.error.message}`)); else done(told.result);
    } else listeners.get(told.sessionId)?.(told.method, told.params);
  });
  const send = (method, params = {}, sessionId = undefined) => new Promise((done, fail) => {
    const id = ++last;
    waiting.set(id, { done, fail, method });
    socket.send(JSON.stringify({ id, method, params, sessionId }));
  });
  return {
    tab: async (listen) => {
      const { targetId } = await send("Target.createTarget", { url: "about:blank" });
      const { sessionId } = await send("Target.attachToTarget", { targetId, flatten: true });
      listeners.set(sessionId, listen);
      const call = (method, params) => send(method, params, sessionId);
      const run = async (expression) => {
        const { result, exceptionDetails } =
          await call("Runtime.evaluate", { expression, returnByValue: true, awaitPromise: true });
        if (exceptionDetails) throw new Error(exceptionDetails.exception?.description ?? exceptionDetails.text);
        return result.value;
      };
      const key = async (name, code, text) => {
        const event = { key: name, code: name === " " ? "Space" : name, windowsVirtualKeyCode: code };
        await call("Input.dispatchKeyEvent", { type: "keyDown", ...event, text });
        await call("Input.dispatchKeyEvent", { type: "keyUp", ...event });
      };
      return { call, run, key, close: () => send("Target.closeTarget", { targetId }) };
    },
    close: async () => {
      const ended = new Promise((done) => child.once("exit", done));
      await send("Browser.close").catch(() => child.kill("SIGKILL"));
      await ended;
      rmSync(folder, { recursive: true, force: true, maxRetries: 5, retryDelay: 100 });
    },
  };
};
