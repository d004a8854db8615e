#!/bin/bash
# rLLM with Tinker: the service holds the model, samples from it and trains a LoRA.
# Settings of one's own follow on the command line:  bash train_verifiers_tinker.sh +verifiers.env_args.max_turns=5
set -euo pipefail
# The key of the service: TINKER_API_KEY, from the environment or from a file .env beside this one.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [ -f "$here/.env" ]; then set -a; . "$here/.env"; set +a; fi
ENV_ID="${ENV_ID:-arithmetic}"
MODEL="${MODEL:-Qwen/Qwen3-4B-Instruct-2507}"
python3 -m verifiers.integrations.rllm.train \
    --config-name=unified \
    rllm/backend=tinker \
    +backend=tinker \
    tinker_base_url="${TINKER_BASE_URL:-null}" \
    model.name="$MODEL" \
    model.lora_rank=32 \
    +verifiers.env_id="$ENV_ID" \
    rllm.algorithm.adv_estimator=grpo \
    training.group_size=16 \
    training.learning_rate=2e-5 \
    validation.group_size=1 \
    rllm.rollout.train.temperature=1.0 \
    rllm.rollout.train.top_p=1.0 \
    rllm.workflow.use_workflow=True \
    data.train_batch_size=64 \
    data.val_batch_size=32 \
    data.max_prompt_length=2048 \
    data.max_response_length=2048 \
    'rllm.trainer.logger=[console]' \
    rllm.trainer.project_name=verifiers \
    rllm.trainer.experiment_name="$ENV_ID" \
    rllm.trainer.total_epochs=10 \
    "$@"
