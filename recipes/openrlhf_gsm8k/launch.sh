#!/usr/bin/env bash
# GRPO on GSM8K with OpenRLHF 0.11.2, on one GPU, or on several: GPUS=4 .../launch.sh
# Needs openrlhf[vllm]. The names were read in OpenRLHF's sources; no GPU was at hand to run it.
# What follows the command goes to OpenRLHF as well: launch.sh --logger.tensorboard_dir runs/tb
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
gpus=${GPUS:-1}
data=${DATA:-runs/openrlhf_gsm8k/data}
out=$(realpath -m "${OUT:-runs/openrlhf_gsm8k}")

[ -f "$data/test.jsonl" ] || python "$here/make_data.py" --out "$data"

# A batch is 16 questions (rollout.batch_size) with 8 completions each, and makes one update, because
# train.batch_size, counted in completions, is 128. The coefficient of the KL is 0 (its default is
# 0.01), so no reference is loaded. DeepSpeed keeps float32 copies of the bfloat16 weights for Adam.
# vLLM's log-probs differ a little from the trainer's, and is_correction weighs each token by their
# ratio, clipped at 2; the default is not to. It evaluates after every 20th step, not before the
# first. The same command goes on from the last checkpoint (ckpt.load_enable).
mkdir -p "$out"
python -m openrlhf.cli.train_ppo_ray \
  --algo.advantage.estimator group_norm \
  --algo.advantage.is_correction_level token \
  --algo.advantage.is_correction_mode clip \
  --algo.advantage.is_correction_threshold 2.0 \
  --algo.kl.init_coef 0 \
  --actor.model_name_or_path "$model" \
  --actor.num_nodes 1 \
  --actor.num_gpus_per_node "$gpus" \
  --actor.adam.lr 1e-6 \
  --actor.lr_scheduler constant_with_warmup \
  --actor.lr_warmup_ratio 0.05 \
  --actor.gradient_checkpointing_enable \
  --ds.zero_stage 2 \
  --ds.param_dtype bf16 \
  --ds.attn_implementation sdpa \
  --train.colocate_all \
  --vllm.num_engines "$gpus" \
  --vllm.tensor_parallel_size 1 \
  --vllm.gpu_memory_utilization 0.3 \
  --vllm.enable_sleep \
  --rollout.batch_size 16 \
  --rollout.n_samples_per_prompt 8 \
  --rollout.micro_batch_size 8 \
  --rollout.max_new_tokens 512 \
  --rollout.temperature 1.0 \
  --train.batch_size 128 \
  --train.micro_batch_size 8 \
  --train.max_epochs 1 \
  --train.num_episodes 1 \
  --data.prompt_dataset "$data/train.jsonl" \
  --data.input_key prompt \
  --data.label_key label \
  --data.apply_chat_template \
  --data.max_len 1024 \
  --reward.remote_url "$here/reward.py" \
  --eval.dataset "$data/test.jsonl" \
  --eval.steps 20 \
  --eval.temperature 0 \
  --eval.n_samples_per_prompt 1 \
  --ckpt.save_steps 20 \
  --ckpt.path "$out/checkpoints" \
  --ckpt.output_dir "$out/model" \
  --ckpt.load_enable \
  "$@"
