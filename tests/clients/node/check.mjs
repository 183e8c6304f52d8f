// OpenAI's client for Node against the server of BASE_URL: prints what it got as one line of JSON.

import OpenAI from "openai";

const { BASE_URL, MAX_TOKENS, MODEL, QUESTION } = process.env;
const client = new OpenAI({ baseURL: BASE_URL, apiKey: "none", maxRetries: 0 });
const request = {
  model: MODEL,
  messages: [{ role: "user", content: QUESTION }],
  temperature: 0,
  max_tokens: Number(MAX_TOKENS),
};
const found = {};

const answer = await client.chat.completions.create(request);
found.answer = answer.choices[0].message.content;

const stream = await client.chat.completions.create({ ...request, stream: true });
found.streamed = "";
for await (const chunk of stream) found.streamed += chunk.choices[0]?.delta?.content ?? "";

const runner = client.chat.completions.stream({
  ...request,
  stream_options: { include_usage: true },
});
found.deltas = 0;
runner.on("content", () => (found.deltas += 1));
const final = await runner.finalChatCompletion();
found.helper = final.choices[0].message.content;
found.usage = (await runner.totalUsage()).completion_tokens;
found.usageOfAnswer = answer.usage.completion_tokens;

// Leaving the loop hangs up.
for await (const chunk of await client.chat.completions.create({
  ...request,
  max_tokens: 900,
  stream: true,
})) {
  found.left = chunk.choices[0].delta.role;
  break;
}

const response = await client.responses.create({
  model: MODEL,
  input: QUESTION,
  temperature: 0,
  max_output_tokens: Number(MAX_TOKENS),
});
found.response = response.output_text;

try {
  await client.chat.completions.create({ ...request, model: "other" });
} catch (error) {
  found.error = { kind: error.constructor.name, status: error.status, code: error.code };
}
found.models = [];
for await (const model of client.models.list()) found.models.push(model.id);

console.log(JSON.stringify(found));
