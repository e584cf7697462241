"""torchvision's RetinaNet, harmonized over all images and levels of a batch at once: IoU with new objects, learned."""

import torch
from torchvision import models, ops, utils

import ghmdet


class HarmonizedHead(models.detection.retinanet.RetinaNetHead):  # also for retinanet_resnet50_fpn(head=...)
    def compute_loss(self, targets, outputs, anchors, matches):  # an anchor's match: an object, -1 none, -2 in between
        rows = [torch.column_stack((t["boxes"], t["labels"])) for t in targets]
        rows = [torch.cat((row, row.new_full((1, 5), -1)))[m.clamp(min=-1)] for row, m in zip(rows, matches)]
        match, labels = torch.stack(matches), torch.stack(rows)[..., 4].long()  # (B, A), a label of -1 for background
        deltas = torch.stack(self.regression_head.box_coder.encode([row[:, :4] for row in rows], anchors))
        ghmc = self.ghmc(outputs["cls_logits"], labels, valid=match != -2)
        ghmr = self.ghmr(outputs["bbox_regression"], deltas, valid=match.unsqueeze(2) >= 0)
        return {"classification": ghmc, "bbox_regression": ghmr}


def main():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(ops.Conv2dNormActivation(c, 32, 5, stride=2) for c in (3, 32, 32, 32)))
    backbone = models.detection.backbone_utils.BackboneWithFPN(layers, {"2": "0", "3": "1"}, [32, 32], 32)
    anchors = models.detection.anchor_utils.AnchorGenerator(((24,), (40,), (56,)), ((0.7, 1.4),) * 3)
    head = HarmonizedHead(32, 2, 2, norm_layer=torch.nn.BatchNorm2d)
    # a network that knows nothing yet has few examples in most regions: without a bound they would drown the others
    head.ghmc, head.ghmr = ghmdet.GHMC(max_weight=30), ghmdet.GHMR(mu=0.1, max_weight=30)
    model = models.detection.RetinaNet(backbone, 2, 64, 64, anchor_generator=anchors, head=head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    boxes = torch.randint(24, (900, 1, 4)) + torch.tensor([0.0, 0, 40, 40])
    labels = ...
    images = []
    for step in range(101):
        if step in (0, 100):
            found = zip(model.eval()(images[:100]), targets)
            iou = sum(ops.box_iou(d["boxes"][d["labels"] == t["labels"]][:1], t["boxes"]).sum().item() for d, t in found)
            print(f"mean IoU {iou/100:.3f} before, ")
        batch = slice(100+8*step, 108+8*step)
        losses = model.train()(images[batch], targets[batch])
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
