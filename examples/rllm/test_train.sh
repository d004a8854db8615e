#!/bin/bash
# The same on 20 rows, one epoch, batches of 4: to see that everything is in its place.
# Settings of one's own follow on the command line:  bash test_train.sh +verifiers.env_args.max_turns=5
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
    +verifiers.env_id="$ENV_ID" \
    rllm.algorithm.adv_estimator=grpo \
    training.learning_rate=2e-5 \
    validation.group_size=1 \
    rllm.rollout.train.temperature=1.0 \
    rllm.rollout.train.top_p=1.0 \
    rllm.workflow.use_workflow=True \
    data.max_prompt_length=2048 \
    data.max_response_length=2048 \
    'rllm.trainer.logger=[console]' \
    rllm.trainer.project_name=verifiers \
    rllm.trainer.experiment_name="$ENV_ID" \
    model.lora_rank=16 \
    +verifiers.max_samples=20 \
    training.group_size=4 \
    data.train_batch_size=4 \
    data.val_batch_size=4 \
    rllm.workflow.n_parallel_tasks=4 \
    rllm.trainer.total_epochs=1 \
    "$@"
