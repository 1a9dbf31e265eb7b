"""Scores of LLaVA's benchmarks, from its own answers files: jsonl, {question_id, prompt, text} for each question."""
