"""Remarks about answers, in English and in Chinese.

A judge returns a `Remark`, which is its English text; plain texts are shown as they are in every language. Labels and
the names of parameters are those of the picture, which is in English: Matplotlib has no Chinese font.
"""

from __future__ import annotations

import re
from typing import Any

# The template in English -> in Chinese.
CHINESE = {
    "{}: not written yet": "{}：还没有写",
    "{}: right in all {} cases": "{}：全部 {} 个用例都正确",
    "{}: {} of {} cases pass. Wrong in case {}, {}: {}": "{}：通过了 {}/{} 个用例。用例 {}（{}）出错：{}",
    "{}: wrong in case {} of {}, {}: {}": "{0}：用例 {1}/{2}（{3}）出错：{4}",
    "stopped after {:g} s, at {}; look for a loop that does not end": (
        "运行 {:g} 秒后被停止，位置是 {}；请检查有没有不会结束的循环"
    ),
    "{}. Python cannot interrupt that line; its thread runs on until it returns": (
        "{}。Python 无法中断这一行，它的线程会一直运行到返回"
    ),
    "it returned None: a `return` with the result is missing": "答案返回了 None：缺少返回结果的 `return`",
    "{} in its line {}: {}": "答案第 {1} 行出现 {0}：{2}",
    "{}: {}": "{}：{}",
    "{} is missing": "缺少 {}",
    "{} is None": "{} 是 None",
    "{} has shape {}, expected {}": "{} 的形状是 {}，应为 {}",
    "{} is {}, expected {}": "{} 是 {}，应为 {}",
    "the ranks send {} bytes, and {} are enough": "所有 rank 共发送 {} 字节，{} 字节就够了",
    "{} is there twice": "{} 出现了两次",
    "{} is not legal": "{} 不合法",
    "{} is dominated, or no plan": "{} 被其他方案支配，或不是给出的方案",
    "{} is no choice for {} ops with {} strategies each": "{} 不是 {} 个算子（每个有 {} 种策略）的选择",
    "{} costs {}, and {} is possible": "{} 的代价是 {}，可以做到 {}",
    "the fastest is not first": "最快的方案不在最前面",
    "{} has the ranks {}, expected {}": "{} 的 rank 是 {}，应为 {}",
    "a message {}, which is not to the next rank": "消息 {} 不是发给下一个 rank 的",
    "it takes {} rounds, and {} are enough": "用了 {} 轮，{} 轮就够了",
    "{!r} is not one of {}": "{!r} 不在 {} 之中",
    "{} takes {:.6g} µs, {} {:.6g} µs": "{} 需要 {:.6g} µs，{} 只要 {:.6g} µs",
    "{} takes {:g} µs, {} {:g} µs": "{} 需要 {:g} µs，{} 只要 {:g} µs",
    "a micro-batch of {} samples, at most {} fit": "有一个微批次含 {} 个样本，最多容纳 {} 个",
    'the answer is {!r}, expected "ring" or "tree"': '答案是 {!r}，应为 "ring" 或 "tree"',
    "{} is not behind y": "{} 不在 y 的计算路径上",
    "{} comes {} times": "{} 出现了 {} 次",
    "{} comes before {}, which reads it": "{} 排在读取它的 {} 之前",
    "makespan {:g}, expected {:g}": "总时间是 {:g}，应为 {:g}",
    "{} stages for {} ranks": "{} 个阶段，而 rank 有 {} 个",
    "an empty stage in {}": "{} 中有空的阶段",
    "{} layers in the stages, there are {}": "各阶段共有 {} 层，而模型有 {} 层",
    "the slowest of {} takes {}, and {} is possible": "{} 中最慢的阶段需要 {}，可以做到 {}",
    "{} is not {} with numbers left out": "{} 不是由 {} 去掉一些数得到的",
    "{} does not fail": "{} 并不失败",
    "{} is not minimal, {} fails, too": "{} 不是最小的，{} 也失败",
    "{}: {} sizes for {} ranks": "{}：{} 个大小，而 rank 有 {} 个",
    "{}: a negative size in {}": "{}：{} 中有负数",
    "{}: {} has the sum {}, expected {}": "{}：{} 的和是 {}，应为 {}",
    "no cuts give the sizes {}": "没有任何切分点给出大小 {}",
    "your test refuses a right program": "你的测试拒绝了正确的程序",
    "your test accepts a wrong program: {}": "你的测试接受了错误的程序：{}",
}


class Remark(str):
    """A text in English that can be translated: a template as for `str.format`, with its arguments."""

    def __new__(cls, template: str, *arguments: Any) -> Remark:
        made = super().__new__(cls, template.format(*arguments))
        made._parts = template, *arguments
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self._parts

    _parts: tuple[Any, ...]


def translated(text: str, language: str) -> str:
    """Return a text in a language, "en" or "zh"; a plain text, or one that is in no table, as it is."""
    if language == "en" or not isinstance(text, Remark) or text._parts[0] not in CHINESE:
        return str(text)
    template, *arguments = text._parts
    return CHINESE[template].format(*(translated(x, language) if isinstance(x, str) else x for x in arguments))


def language_of(text: str | None) -> str:
    """Return "zh" for a text with Chinese characters, else "en"."""
    return "zh" if re.search("[\u4e00-\u9fff]", text or "") else "en"
