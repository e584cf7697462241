"""GHM-C in a plain multi-label classifier: 20 labels, each on one example in a hundred, some of them wrong.

One sees the mean average precision on new, clean examples before and after training. How rare the labels are was not
said anywhere: the loss finds out how many examples are how hard."""

import torch

import ghmdet


def examples(count: int, rule: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # (B, 32), (B, 20)
    x = torch.randn(count, 32)
    return x, (x @ rule > 2.3).float()


def mean_average_precision(scores: torch.Tensor, labels: torch.Tensor) -> float:
    hits = labels.gather(0, scores.argsort(0, descending=True))
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1).unsqueeze(1)
    return ((precision * hits).sum(0) / hits.sum(0)).mean().item()


def main() -> None:
    torch.manual_seed(0)
    rule = torch.nn.functional.normalize(torch.randn(32, 20), dim=0)
    (x, labels), (new, truth) = examples(8192, rule), examples(8192, rule)
    labels = (labels - (torch.rand_like(labels) < 0.001).float()).abs()  # so that one given label in eleven is wrong
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 20))
    criterion = ghmdet.GHMC(max_weight=10)  # 5,000 examples a batch: where a region holds a handful, its β is noise
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    print(f"mean average precision: {mean_average_precision(model(new), truth):.3f} before", end=", ")
    for batch in torch.randint(len(x), (400, 256)):
        optimizer.zero_grad()
        criterion(model(x[batch]), labels[batch]).backward()
        optimizer.step()
    print(f"{mean_average_precision(model(new), truth):.3f} after")


if __name__ == "__main__":
    main()
