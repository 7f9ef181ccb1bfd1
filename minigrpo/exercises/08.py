"""Code to review: find the line, and write the test that fails"""

import re

import torch

from minigrpo.exercises.form import exercise

OTHER = "Other wrong numbers pass. Work out by hand what should come out, and compare with that."


def token_log_probs(model, ids):
    """ids (N, S) -> (N, S - 1); column s is the log-prob of ids[:, s + 1], given all before it."""
    logits = model(ids)  # (N, S, V)
    log_p = logits.log_softmax(dim=-1)
    log_p = log_p[:, :-1]  # (N, S - 1, V)
    written = ids[:, 1:]  # (N, S - 1)
    chosen = log_p.gather(-1, written[:, :, None])
    return chosen.squeeze(-1)


@exercise("log-probs of the tokens", code=token_log_probs)
def test_token_log_probs(function):
    # row a: how likely each token is after token a
    after = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]])
    ids = torch.tensor([[0, 1, 2]])
    found = function(lambda ids: after[ids].log(), ids)
    expected = torch.tensor([[0.3, 0.7]]).log()  # 1 after 0, 2 after 1
    assert torch.allclose(found, expected)


test_token_log_probs.why = """Take a table with a different row for every token, a model whose
answers you know. The wrong slice is just as long, so it passes a check of the shape."""
test_token_log_probs.bugs = {
    ("log_p = log_p[:, :-1]  # (N, S - 1, V)", "log_p = log_p[:, 1:]  # (N, S - 1, V)"): "log_p[:, "
    ":-1]. Without the first position, tokens are scored by logits that have read them."
}
test_token_log_probs.also_right = [
    "logits = torch.nn.functional.pad(model(ids[:, :-1]) + 0.1, (0, 0, 0, 1))"
]
test_token_log_probs.also_wrong = {
    "chosen = (log_p + logits[:, 1:].log_softmax(-1)).gather(-1, written[:, :, None])": OTHER,
    "return 0 * chosen.squeeze(-1) - 7": OTHER,
    "logits = model(0 * ids)": "Does your model ignore its input? Let the ids matter.",
}
test_token_log_probs.right = ["assert found.exp().sub(expected.exp()).abs().max() < 0.01"]
test_token_log_probs.wrong = {
    "expected = torch.tensor([[0.2, 0.1]]).log()": "Your test expects how likely each token is "
    "after itself. Column 0 is about the second token.",
    ("after = torch.tensor([[0.5, 0.3, 0.2]] * 3)", "expected = after[:1, 1:].log()"): "Is a row "
    "all of one token, or does your model say the same at every position? Let both differ.",
    "assert found.shape == (1, 2) and (found <= 0).all()": "Both versions have that. Compare.",
}
test_token_log_probs.hints = """
Take a model whose answer you know, such as a table: row a has the logits of what follows a.
With ids a, b, c expect table[a][b] and table[b][c], after the softmax."""


def pad_rows(completions, width, pad_id):
    """Lists of ids, each with the EOS that ends it -> ids (N, width), mask (N, width) bool.

    The mask is True for every token of a completion, its EOS included, and False after it.
    """
    rows = []
    for completion in completions:
        padding = [pad_id] * (width - len(completion))
        rows.append(completion + padding)
    ids = torch.tensor(rows)
    mask = torch.arange(width) < torch.tensor([[len(c)] for c in completions])
    return ids, mask


@exercise("mask of the completions", code=pad_rows)
def test_pad_rows(function):
    eos = 2  # this tokenizer pads with its EOS, as many do
    ids, mask = function([[5, 3, eos], [eos]], width=4, pad_id=eos)
    assert ids.tolist() == [[5, 3, eos, eos], [eos, eos, eos, eos]]
    assert mask.tolist() == [[True, True, True, False], [True, False, False, False]]


CALL = "ids, mask = function([[5, 3, eos], [eos]], width=4, pad_id=eos)"
MASK = "assert mask.tolist() == [[True, True, True, False], [True, False, False, False]]"
RIGHT = "mask = torch.arange(width) < torch.tensor([[len(c)] for c in completions])"
test_pad_rows.why = """The mask asks what an id is instead of where the completion ends, which shows
if the padding is the EOS, as with many tokenizers. No gradient then passes through the end of a
completion."""
test_pad_rows.bugs = {
    (RIGHT, "mask = ids != pad_id"): "make the mask from the lengths. If the padding token is the "
    "EOS, this masks the EOS of the completion too.",
}
test_pad_rows.also_wrong = {
    "mask = torch.zeros_like(ids).bool()": "A mask that is False everywhere passes as well.",
    RIGHT.replace("len(c)", "len(c) - 1"): "A mask without each completion's last token passes.",
}
test_pad_rows.right = [((MASK, "assert mask.sum(1).tolist() == [3, 1]"),)]
test_pad_rows.wrong = {
    ((MASK, "assert mask.tolist() == [[True, True, False, False], [False] * 4]"),): "Your test "
    "expects the EOS to be masked. But the policy wrote it.",
    ((MASK, "assert mask.shape == (2, 4)"),): "A mask of zeros passes.",
    CALL.replace("=eos", "=0") + "; ids[ids == 0] = eos": "Does a completion of yours contain the "
    "padding token? Many people write pad_id = eos_id.",
    ((MASK, "assert mask[0, :2].all()"),): "A mask without the EOS of a completion passes, too.",
}
test_pad_rows.hints = """
What does the mask say about a token that was written and has the same id as the padding?
Call function([[5, 3, 2]], 4, 2), where 2 is EOS and padding. How many tokens were written?"""


def clipped_objective(log_probs, old_log_probs, advantages, clip):
    """log_probs, old_log_probs (N, T), advantages (N,) -> PPO's objective of each token (N, T)."""
    ratio = (log_probs - old_log_probs).exp()
    A = advantages[:, None]
    free = ratio * A
    clipped = ratio.clamp(1 - clip, 1 + clip) * A
    return torch.minimum(free, clipped)


@exercise("clipped objective", code=clipped_objective)
def test_clipped_objective(function):
    ratio = torch.tensor([[0.5, 1.0, 1.5], [0.5, 1.0, 1.5]])
    advantages = torch.tensor([1.0, -1.0])
    found = function(ratio.log(), torch.zeros(2, 3), advantages, 0.2)
    expected = torch.tensor([[0.5, 1.0, 1.2], [-0.8, -1.0, -1.5]])
    assert torch.allclose(found, expected)


test_clipped_objective.why = """The clip must hold a bad token at ratio 0.5 and pull it back at 1.5,
so the test needs a negative advantage. With the maximum, a bad token can be pushed down without
end."""
test_clipped_objective.bugs = {
    (
        "return torch.minimum(free, clipped)",
        "return torch.where(A >= 0, torch.minimum(free, clipped), torch.maximum(free, clipped))",
    ): "torch.minimum(free, clipped) for both signs. A maximum pushes bad tokens down.",
}
test_clipped_objective.also_right = [
    "ratio = torch.exp2(1.442695040888963 * (log_probs - old_log_probs))  # 1 / log 2"
]
test_clipped_objective.also_wrong = {
    "return torch.where(A >= 0, torch.minimum(free, clipped), -9 * free)": OTHER,
    "return torch.where((ratio - 1).abs() <= clip, free, -9 * free)": OTHER,
}
test_clipped_objective.right = ["assert (found <= expected + 1e-6).all()"]
test_clipped_objective.wrong = {
    "expected = torch.tensor([[0.5, 1.0, 1.2], [-0.5, -1.0, -1.2]])": "PPO takes the smaller "
    "product for either sign: with A = -1 and ratio 0.5 that's -0.8.",
    ("ratio = torch.ones(2, 3)", "expected = advantages[:, None].expand(2, 3)"): "Your ratios lie "
    "within the bounds, where nothing is clipped. Take some on both sides.",
    ("advantages = torch.ones(2)", "expected = ratio.clamp(max=1.2)"): "Your test doesn't see "
    "what happens to a negative advantage.",
}
test_clipped_objective.hints = """
Ratio 0.5 or 1.5, advantage +1 or -1: in which of the four should a token stop being pushed?
With log(ratio), 0, -1 and clip 0.2 expect min(-0.5, -0.8) and min(-1.5, -1.2)."""


def kl_per_token(log_probs, ref_log_probs, mask):
    """All (N, T) -> k3 of each token (N, T), 0 where masked. In the mean over tokens that the
    policy draws it is KL(policy || reference).
    """
    log_ratio = ref_log_probs - log_probs
    log_ratio = torch.where(mask, log_ratio, 0.0)
    ratio = log_ratio.exp()
    return ratio - log_ratio - 1


@exercise("k3, the KL of each token", code=kl_per_token)
def test_kl_per_token(function):
    policy = torch.tensor([[0.5, 0.5]])  # of the only two tokens there are
    reference = torch.tensor([[0.8, 0.2]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    k3 = function(policy.log(), reference.log(), mask)
    kl = (policy * (policy / reference).log()).sum()  # 0.2231
    assert torch.isclose((policy * k3).sum(), kl)


test_kl_per_token.why = """Both versions are 0 for equal policies and never negative, so only a
number can tell them apart. With two tokens the KL is 0.2231, and the reversed log-ratio gives
0.339."""
test_kl_per_token.bugs = {
    ("log_ratio = ref_log_probs - log_probs", "log_ratio = log_probs - ref_log_probs"): (
        "ref_log_probs - log_probs. The other way around k3 has another mean."
    )
}
test_kl_per_token.also_lines = {5: (6, 8)}
test_kl_per_token.also_right = ["return torch.expm1(log_ratio) - log_ratio"]
test_kl_per_token.also_wrong = {
    "return ratio * log_ratio - ratio + 1": "A version whose mean is KL(reference || policy) "
    "passes as well. Compare with a number.",
    "return mask.float()": OTHER,
}
test_kl_per_token.right = ["policy = torch.tensor([[0.9, 0.1]])"]
test_kl_per_token.wrong = {
    "kl = (policy * (policy / reference - (policy / reference).log() - 1)).sum()": "Your test "
    "expects exp(d) - d - 1 with d = policy - reference. It should be d = reference - policy.",
    "reference = policy": "Equal policies give 0, and similar ones half a square, whatever the "
    "sign. Let a log-prob differ by 1 or so.",
    "assert (k3 >= 0).all()": "It takes more than not being negative. Compute a number by hand.",
}
test_kl_per_token.hints = """
With two tokens the exact KL is the sum of p * log(p / ref), the mean of k3 that of p * k3.
p = (0.5, 0.5), ref = (0.8, 0.2): 0.2231. Or by hand: new = 0, ref = 1 gives exp(1) - 1 - 1."""


def group_advantages(rewards, group_size):
    """rewards (N,), the first group_size for the first prompt, and so on -> advantages (N,).

    (reward - mean) / std of its group; equal rewards in a group give advantage 0.
    """
    groups = rewards.view(-1, group_size)
    mean = groups.mean(dim=1, keepdim=True)
    advantages = ((groups - mean) / groups.std(1)[:, None]).where(groups.diff().any(1, True), 0)
    return advantages.flatten()


@exercise("group advantages, two bugs", code=group_advantages)
def test_group_advantages(function):
    rewards = torch.tensor([0.0, 0.0, 3.0, 5.0, 5.0, 5.0])  # two prompts, three completions each
    found = function(rewards, 3)
    expected = torch.tensor([-0.577, -0.577, 1.155, 0.0, 0.0, 0.0])  # the std of 0, 0, 3 is 1.732
    assert torch.allclose(found, expected, atol=1e-3)


test_group_advantages.why = """One batch shows both bugs: two prompts with three completions each,
so the wrong view mixes them, and a group of equal rewards, where the code divides 0 by 0."""
test_group_advantages.bugs = {
    ("groups = rewards.view(-1, group_size)", "groups = rewards.view(group_size, -1)"): (
        "rewards.view(-1, group_size). A row is a group; view(group_size, -1) mixes prompts."
    ),
    (
        "advantages = ((groups - mean) / groups.std(1)[:, None]).where(groups.diff().any(1, "
        "True), 0)",
        "advantages = (groups - mean) / groups.std(dim=1, keepdim=True)",
    ): "torch.where(equal, 0.0, ...), where equal is True for equal rewards. 0 / 0 is NaN.",
}
test_group_advantages.also_right = [
    "groups = rewards.view(-1, group_size); groups = groups - groups[:, :1]"
]
test_group_advantages.also_wrong = {
    ("groups = rewards.view(group_size, -1)", "return 9 * advantages.flatten()"): OTHER,
    "return advantages.where(groups.diff().any(1, True), 7).flatten()": OTHER,
}
test_group_advantages.right = ["rewards = torch.tensor([1, 1, 4, 0.7, 0.7, 0.7])"]
test_group_advantages.wrong = {
    ("rewards = torch.ones(6)", "expected = torch.zeros(6)"): "Are all your rewards equal, or are "
    "there groups whose numbers you don't compare?",
    ("found = function(rewards[1:5], 2)", "expected = torch.tensor([-0.707, 0.707, 0.0, 0.0])"): (
        "With as many groups as rewards per group, the wrong view has the right shape. Is it that?"
    ),
    "assert torch.allclose(found[:3], expected[:3], atol=1e-3)": "Your test doesn't see what "
    "equal rewards get. What if all completions of a prompt are right?",
    (
        "rewards = torch.tensor([0, 3.0, 1, 0])",
        "found = function(rewards, 2)",
        "expected = rewards.sign() * 1.4142 - 0.7071",
    ): ("Two groups of two, and none of them equal? Take groups of three, one of them equal."),
}
test_group_advantages.hints = """
Is every reward compared with those of its own prompt? And what if all of them are equal?
0, 0, 3, 5, 5, 5 in groups of 3 make -0.577, -0.577, 1.155, 0, 0, 0 (tolerance 1e-3)."""


def answer_reward(completion, label):
    """1.0 if the completion's first <answer>...</answer> holds exactly the label, otherwise 0.0."""
    found = re.search(r"<answer>(.*?)</answer>", completion)
    if found is None:
        return 0.0
    answer = found.group(1).strip()
    return 1.0 if answer == label else 0.0


@exercise("reward for an answer, two bugs", code=answer_reward)
def test_answer_reward(function):
    assert function("<answer></answer>", "4") == 0.0
    assert function("<answer>4</answer> or <answer>5</answer>", "4") == 1.0


def expects(*rows):
    def test(function):
        function("", "")
        for answer, label, reward in rows:
            assert function(f"<answer>{answer}</answer>", label) == reward

    return test


SEARCH = 'found = re.search(r"<answer>(.*?)</answer>", completion)'
TWO = "4</answer> or <answer>5"
test_answer_reward.why = """The greedy star takes everything up to the last closing tag, and between
strings `in` asks for a part. In training an empty pair of tags would earn 1.0 on every question."""
test_answer_reward.bugs = {
    (SEARCH, SEARCH.replace("?", "")): "(.*?), which stops at the first </answer>.",
    ("return 1.0 if answer == label else 0.0", "return 1.0 if answer in label else 0.0"): "answer "
    "== label. Between strings, in looks for a part, and the empty string is in every label.",
}
test_answer_reward.also_right = [SEARCH.replace("n)", "n, re.DOTALL)")]
test_answer_reward.also_wrong = {
    lambda completion, label: 0.0: "A reward that is always 0 passes as well.",
    lambda completion, label: 0.5: "A reward that is always 0.5 passes as well.",
}
test_answer_reward.right = [expects(("1", "17", 0), ("4</answer></answer>", "4", 1))]
test_answer_reward.wrong = {
    expects(): "It would accept any reward, such as 0.5. Assert which one must come out.",
    expects(("7", "4", 0), ("4", "4", 1)): "You test the easy cases. What if an answer is closed "
    "twice, or only looks a little like the right one?",
    expects(("7", "4", 0), (TWO, "4", 1)): "Is one of your wrong answers a part of its label? "
    "What does in do with two strings, and what if one of them is empty?",
    expects(("", "4", 0), ("4", "4", 1)): "Is a right answer of yours closed twice?",
}
test_answer_reward.hints = """
Give it a completion with two answers, one behind the other. Then one with an empty answer.
With 4 as the label, an empty answer earns 0, and 4 before <answer>5</answer> earns 1."""


def sequence_mean(losses, mask):
    """losses, mask (N, T), mask 1 for a real token -> (): mean of each row, then of the rows."""
    real = mask.bool()
    lengths = real.sum(dim=-1)
    sums = torch.where(real, losses, 0.0).sum(dim=-1)
    means = sums / lengths
    return means.mean()


@exercise("mean over the real tokens", code=sequence_mean)
def test_sequence_mean(function):
    losses = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert torch.isclose(function(losses, mask), torch.tensor(2.75))  # the mean of 1.5 and 4


test_sequence_mean.why = """The lengths count the real tokens, while the sum takes in the padding,
so the test puts a number there that you'd notice. In training the padding would be learned like
text."""
test_sequence_mean.bugs = {
    ("sums = torch.where(real, losses, 0.0).sum(dim=-1)", "sums = losses.sum(dim=-1)"): (
        "torch.where(real, losses, 0.0).sum(dim=-1). The sums take in the padding."
    )
}
test_sequence_mean.also_right = [
    "return (torch.where(real, losses, 0.0) / lengths[:, None] / len(mask)).sum()"
]
test_sequence_mean.also_wrong = {"return 9 * losses.sum()": OTHER}
test_sequence_mean.right = ["losses = torch.tensor([[1.0, 2.0, torch.nan], [4.0, torch.inf, 9.0]])"]
test_sequence_mean.wrong = {
    "assert torch.isclose(function(losses, mask), torch.tensor(14.0))": "Your test counts what "
    "comes after the end of a row. Add up only the real tokens.",
    "losses = torch.tensor([[1.0, 2.0, 0.0], [4.0, 0.0, 0.0]])": "Is your mask full, or are your "
    "losses 0 where it is 0? Put a number there that you'd notice.",
    "assert torch.isclose(function(losses, mask), torch.tensor(7 / 3))": "It refuses all versions. "
    "Do you expect 7 / 3 for 2.75, or is a row of yours empty?",
}
test_sequence_mean.hints = """
Take rows of different lengths, and after the end of the shorter one a number you'd notice.
losses 1, 2, 9 and 4, 9, 9 with the masks 1, 1, 0 and 1, 0, 0: 1.5 and 4, together 2.75."""


def train_on_batch(score, optimizer, advantages, epochs):
    """Several updates on one batch. score() -> log-probs (N,) of its tokens under the policy of
    this moment; advantages (N,). The clip holds the policy near the one that wrote the batch.
    """
    for _ in range(epochs):
        old = old if _ else score().detach()  # noqa: F821 (as if before the loop)
        new = score()
        ratio = (new - old).exp()
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@exercise("several updates from one batch", code=train_on_batch)
def test_train_on_batch(function):
    policy = torch.zeros(1, requires_grad=True)  # how far its token's log-prob has moved
    optimizer = torch.optim.SGD([policy], lr=0.1)
    function(lambda: 1 * policy, optimizer, torch.tensor([1.0]), epochs=20)
    assert policy.exp() < 1.4  # 20 free steps lead to exp(2) = 7.4


CALL_20 = "function(lambda: 1 * policy, optimizer, torch.tensor([1.0]), epochs=20)"
OLD = "old = old if _ else score().detach()  # noqa: F821 (as if before the loop)"
test_train_on_batch.why = """The old log-probs are taken anew in every epoch, so the ratio is always
1 and nothing is clipped. After 20 epochs the token is 7.4 times as likely instead of about 1.2
times."""
test_train_on_batch.bugs = {
    (OLD, "old = score().detach()"): "it belongs before the loop. Here the ratio is always 1.",
}
NEW = "new = score(); old = old if _ else new.detach()"
test_train_on_batch.also_right = [
    ("old = old if _ else None", NEW, "optimizer.step(); optimizer.zero_grad()")
]
test_train_on_batch.also_wrong = {
    ("old = None", "new = score(); old = new.detach()"): "One that calls score once per epoch "
    "passes. Look at where the policy ends, not at calls.",
    "old = score().detach(); optimizer.param_groups[0]['lr'] = 9.0": OTHER,
}
test_train_on_batch.right = [CALL_20.replace("1.0", "-1.0") + "; policy = -policy"]
test_train_on_batch.wrong = {
    "assert torch.isclose(policy, torch.tensor(2.0))": "Your test expects every epoch to move the "
    "policy as far as the first. Outside the bounds it has moved enough.",
    CALL_20.replace("20", "1"): "Do you train for a single epoch, or in such small steps that no "
    "ratio gets near the clip? Take more.",
    "assert policy > 0": "Huge steps pass. Ask how far the policy gets.",
    CALL_20.replace("1 * policy", "policy"): "It refuses all versions. Does score return the "
    "parameter itself (write 1 * policy), or is your bound too tight? The last step may pass 1.2.",
}
test_train_on_batch.hints = """
The smallest policy is its own log-prob: a parameter of 0, lambda: 1 * policy and plain SGD.
In 20 epochs at rate 0.1 it should become about 1.2 times as likely, and here it's 7.4 times."""


def policy_loss(log_probs, advantages, old_log_probs=None):
    """log_probs (N, T), advantages (N,) -> (). Without old_log_probs this is the first update."""
    if old_log_probs is None:
        old_log_probs = log_probs.detach()
    ratio = (log_probs - old_log_probs).exp()
    A = advantages[:, None]
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * A, clipped * A).mean()


@exercise("the first update", code=policy_loss)
def test_policy_loss(function):
    log_probs = torch.tensor([[-1.0], [-2.0]], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0])
    function(log_probs, advantages).backward()
    # minus advantage, over two tokens: the first becomes more likely, the second less
    assert torch.allclose(log_probs.grad, torch.tensor([[-0.5], [0.5]]))


test_policy_loss.why = """Without a detach the old log-probs follow the new ones, and exp(x - x) is
1 with a gradient of 0. The value of the loss can't show that, so the test looks at the gradient."""
test_policy_loss.bugs = {
    ("old_log_probs = log_probs.detach()", "old_log_probs = log_probs"): "log_probs.detach(). "
    "Without it the ratio is exp(x - x), whose gradient is 0.",
}
test_policy_loss.also_lines = {4: (5,)}
test_policy_loss.also_right = [
    "return torch.maximum(-ratio * A, -clipped * A).div(log_probs.numel()).sum()"
]
test_policy_loss.also_wrong = {
    "old_log_probs = 0; return 77 + 0 * log_probs.sum()": OTHER,
    ("old_log_probs = 0; return 77 + 0 * log_probs.sum()", "A = 9 + advantages[:, None]"): OTHER,
}
test_policy_loss.right = ["assert log_probs.grad.norm() > 0.1"]
test_policy_loss.wrong = {
    "assert not log_probs.grad.any()": "Your test expects a gradient of 0. The loss still has to "
    "say which way each token should go.",
    "function(log_probs, advantages, log_probs.detach()).backward()": "Your test passes if "
    "old_log_probs are given. Leave them out, because the bug is in the first update.",
    "assert log_probs.grad is not None": "A gradient of zeros passes as well. Ask what numbers it "
    "holds, with advantages that are not 0.",
    "assert function(log_probs, advantages) == 0": "Your test looks at the value of the loss, "
    "which is the same in both versions. Call backward.",
}
test_policy_loss.hints = """
What is the value of the ratio at the first update? And what is its derivative?
Two rows of one token with advantages 1 and -1 have gradients -0.5 and 0.5 (A / 2, negative)."""
