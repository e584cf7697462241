"""A Harmonizer around a loss of one's own: smoothed labels, and pixels without a label along every edge. One sees the
mean IoU of background, bright and dark discs in new noisy pictures, before and after training."""

import torch

import ghmdet


def pictures(count: int) -> tuple[torch.Tensor, torch.Tensor]:  # (B, 1, 32, 32), (B, 32, 32)
    kind, centre = torch.randint(1, 3, (count, 1, 1)), torch.randint(5, 27, (count, 2, 1, 1))
    edge = (torch.cartesian_prod(*[torch.arange(32)] * 2).T.view(2, 32, 32) - centre).square().sum(1).sqrt() - 4
    labels = torch.where(edge < 0, kind, 0).masked_fill(edge.abs() < 0.5, 255)
    return ((edge < 0) * (3 - 2 * kind)).unsqueeze(1) + torch.randn(count, 1, 32, 32), labels


def mean_iou(scores: torch.Tensor, labels: torch.Tensor) -> float:
    found, true = (torch.nn.functional.one_hot(x[labels < 255], 3) for x in (scores.argmax(1), labels))
    return ((found & true).sum(0) / (found | true).sum(0)).mean().item()


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 16, 7, 1, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 3, 7, 1, 3))
    own_loss = torch.nn.CrossEntropyLoss(ignore_index=255, label_smoothing=0.1, reduction="none")
    harmonizer = ghmdet.Harmonizer(max_weight=30)  # without the smoothing: ghmdet.SoftmaxGHMC(ignore_index=255)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    new, truth = pictures(200)
    print(f"mean IoU: {mean_iou(model(new), truth):.3f} before", end=", ")
    for x, labels in map(pictures, [16] * 100):
        scores = model(x)
        p = scores.detach().softmax(1).gather(1, labels.clamp(max=2).unsqueeze(1)).squeeze(1)  # of the true class
        optimizer.zero_grad()
        harmonizer.harmonize(own_loss(scores, labels), 1 - p, valid=labels < 255).backward()
        optimizer.step()
    print(f"{mean_iou(model(new), truth):.3f} after")


if __name__ == "__main__":
    main()
