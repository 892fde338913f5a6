// The `openai` package for node: completions, chat, streamed and not, and the error for long prompts. See test_clients.py.
import OpenAI from "openai";

const [baseURL, model, prompt, question, maxTokens, tooLong] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none needed", maxRetries: 0, timeout: 60_000 });
const limits = { model, max_tokens: Number(maxTokens), temperature: 0 };
const messages = [{ role: "user", content: question }];

const whole = await client.completions.create({ prompt, ...limits });
const completionPieces = [];
for await (const chunk of await client.completions.create({ prompt, stream: true, ...limits })) {
  completionPieces.push(chunk.choices[0].text);
}
const chat = await client.chat.completions.create({ messages, user: "somebody", ...limits });
const chatPieces = [];
const stream = client.chat.completions.stream({ messages, stream_options: { include_usage: true }, ...limits });
stream.on("content", (delta) => chatPieces.push(delta));
const usage = await stream.totalUsage();
const models = [];
for await (const each of client.models.list()) models.push(each.id);
const overflow = await client.chat.completions
  .create({ messages: [{ role: "user", content: tooLong }], ...limits })
  .then(() => "none", (error) => error.code);
console.log(
  JSON.stringify({
    models,
    completion: whole.choices[0].text,
    completion_pieces: completionPieces,
    completion_usage: [whole.usage.prompt_tokens, whole.usage.completion_tokens],
    chat: chat.choices[0].message.content,
    chat_pieces: chatPieces,
    chat_usage: [usage.prompt_tokens, usage.completion_tokens],
    overflow,
  }),
);
