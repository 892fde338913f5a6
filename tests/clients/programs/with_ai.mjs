// `ai` with `@ai-sdk/openai-compatible`: completions, chat, streamed and not. See test_clients.py.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";

const [baseURL, model, prompt, question, maxTokens, tooLong] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "twostroke", baseURL, apiKey: "none needed", includeUsage: true });
const limits = { maxOutputTokens: Number(maxTokens), temperature: 0, maxRetries: 0 };

// A completion model of this package turns messages into a text of its own; so the chat models alone are compared.
const chat = await generateText({ model: provider(model), prompt: question, ...limits });
const stream = streamText({ model: provider(model), prompt: question, ...limits });
const chatPieces = [];
for await (const piece of stream.textStream) chatPieces.push(piece);
const usage = await stream.usage;
const overflow = await generateText({ model: provider(model), prompt: tooLong, ...limits }).then(
  () => "none",
  (error) => (APICallError.isInstance(error) ? JSON.parse(error.responseBody).error.code : String(error)),
);
console.log(
  JSON.stringify({
    chat: chat.text,
    chat_pieces: chatPieces,
    chat_usage: [usage.inputTokens, usage.outputTokens],
    overflow,
  }),
);
