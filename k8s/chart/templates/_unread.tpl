{{/*
Values that no template reads. One with a default in values.yaml can be told from it only where it differs; `defaults` has those,
and the chart refuses its own values when values.yaml says something else.
*/}}
{{- define "torchere.unread" -}}
{{- $v := include "torchere.effective" . | fromYaml -}}
{{- $store := $v.storeType -}}
{{- $lws := .Values.leaderWorkerSet -}}
{{- $outside := ne .Values.service.type "ClusterIP" -}}
{{- range list
      (dict "read" (eq $store "pvc") "when" "modelStore.type pvc" "values" (pick .Values.modelStore.pvc "claimName" "subPath" "create" "annotations") "path" "modelStore.pvc")
      (dict "read" (eq $store "image") "when" "modelStore.type image" "values" (pick .Values.modelStore.image "reference" "subPath") "path" "modelStore.image")
      (dict "read" (eq $store "s3") "when" "modelStore.type s3" "values" (omit .Values.modelStore.s3 "image") "path" "modelStore.s3")
      (dict "read" (eq $store "gcs") "when" "modelStore.type gcs" "values" (pick .Values.modelStore.gcs "uri" "secretName") "path" "modelStore.gcs")
      (dict "read" (eq $store "azure") "when" "modelStore.type azure" "values" .Values.modelStore.azure "path" "modelStore.azure")
      (dict "read" (eq $store "init") "when" "modelStore.type init" "values" .Values.modelStore.init "path" "modelStore.init")
      (dict "read" .Values.modelStore.pvc.create "when" "modelStore.pvc.create" "values" (pick .Values.modelStore.pvc "storageClassName" "annotations") "path" "modelStore.pvc")
      (dict "read" .Values.tls.enabled "when" "tls.enabled" "values" .Values.tls "path" "tls")
      (dict "read" $lws.enabled "when" "leaderWorkerSet.enabled" "values" (pick $lws "secretName") "path" "leaderWorkerSet")
      (dict "read" .Values.management.enabled "when" "management.enabled" "values" (pick .Values.networkPolicy "managementFrom") "path" "networkPolicy")
      (dict "read" .Values.networkPolicy.enabled "when" "networkPolicy.enabled" "values" (pick .Values.networkPolicy "inferenceFrom" "managementFrom" "extraEgress") "path" "networkPolicy")
      (dict "read" (eq .Values.service.type "LoadBalancer") "when" "service.type LoadBalancer" "values" (pick .Values.service "loadBalancerClass" "loadBalancerSourceRanges") "path" "service")
      (dict "read" $outside "when" "service.type NodePort or LoadBalancer" "values" (pick .Values.service "externalTrafficPolicy" "httpNodePort" "grpcNodePort") "path" "service")
      (dict "read" .Values.ingress.enabled "when" "ingress.enabled" "values" .Values.ingress "path" "ingress")
      (dict "read" .Values.httpRoute.enabled "when" "httpRoute.enabled" "values" (omit .Values.httpRoute "paths" "weight") "path" "httpRoute")
      (dict "read" .Values.autoscaling.enabled "when" "autoscaling.enabled" "values" (pick .Values.autoscaling "extraMetrics") "path" "autoscaling")
      (dict "read" .Values.keda.enabled "when" "keda.enabled" "values" (pick .Values.keda "latencyThresholdSeconds" "extraTriggers" "authentication" "fallback") "path" "keda")
      (dict "read" .Values.serviceMonitor.enabled "when" "serviceMonitor.enabled" "values" (pick .Values.serviceMonitor "scrapeTimeout" "labels" "relabelings" "metricRelabelings") "path" "serviceMonitor")
      (dict "read" .Values.prometheusRule.enabled "when" "prometheusRule.enabled" "values" (pick .Values.prometheusRule "labels" "disabled" "extraGroups") "path" "prometheusRule")
      (dict "read" .Values.dashboards.enabled "when" "dashboards.enabled" "values" (pick .Values.dashboards "annotations") "path" "dashboards")
      (dict "read" .Values.serviceAccount.create "when" "serviceAccount.create" "values" (pick .Values.serviceAccount "annotations") "path" "serviceAccount")
      (dict "read" (gt (int $v.gpus) 0) "when" "gpu.count above 0" "values" (dict "resourceName" (ternary "" .Values.gpu.resourceName (eq .Values.gpu.resourceName "nvidia.com/gpu"))) "path" "gpu")
      (dict "read" (eq $v.configFrom "chart") "when" "server.configFrom chart" "values" (dict "address" (ternary "" .Values.server.address (eq .Values.server.address "0.0.0.0"))) "path" "server")
      (dict "read" (and .Values.management.enabled (eq $v.configFrom "chart")) "when" "management.enabled and server.configFrom chart" "values" (pick .Values.management "insecure") "path" "management")
      (dict "read" .Values.modelStore.pvc.create "when" "modelStore.pvc.create" "values" .Values.modelStore.pvc "path" "modelStore.pvc"
        "defaults" (dict "size" "20Gi" "accessModes" (list "ReadWriteMany")))
      (dict "read" (has $store (list "s3" "gcs" "azure" "init")) "when" "modelStore.type s3, gcs, azure or init" "values" .Values.modelStore "path" "modelStore"
        "defaults" (dict "sizeLimit" "20Gi" "resources" (dict "requests" (dict "cpu" "100m" "memory" "256Mi") "limits" (dict "memory" "1Gi"))))
      (dict "read" (eq $v.configFrom "chart") "when" "server.configFrom chart" "values" .Values.server "path" "server"
        "defaults" (dict "workersPerModel" 1 "queueSize" 100 "responseTimeoutSeconds" 120 "openInferenceProtocol" true))
      (dict "read" .Values.httpRoute.enabled "when" "httpRoute.enabled" "values" .Values.httpRoute "path" "httpRoute"
        "defaults" (dict "paths" (list "/") "weight" 100))
      (dict "read" (and .Values.auth.enabled (not .Values.auth.secretName)) "when" "auth.enabled and an empty auth.secretName" "values" .Values.auth "path" "auth"
        "defaults" (dict "expirationMinutes" 60))
      (dict "read" .Values.auth.secretName "when" "auth.secretName" "values" .Values.auth "path" "auth"
        "defaults" (dict "secretKey" "keys.json"))
      (dict "read" .Values.autoscaling.enabled "when" "autoscaling.enabled" "values" .Values.autoscaling "path" "autoscaling"
        "defaults" (dict "minReplicas" 2 "maxReplicas" 10 "metric" "torchere_saturation" "averageValue" "700m"))
      (dict "read" .Values.keda.enabled "when" "keda.enabled" "values" .Values.keda "path" "keda"
        "defaults" (dict "minReplicas" 1 "maxReplicas" 10 "serverAddress" "http://prometheus-operated.monitoring.svc:9090" "saturationThreshold" "0.7" "activationThreshold" "0" "pollingIntervalSeconds" 15 "cooldownPeriodSeconds" 300))
      (dict "read" $lws.enabled "when" "leaderWorkerSet.enabled" "values" $lws "path" "leaderWorkerSet"
        "defaults" (dict "size" 2 "port" 29400 "secretKey" "secret"))
      (dict "read" .Values.podDisruptionBudget.enabled "when" "podDisruptionBudget.enabled" "values" .Values.podDisruptionBudget "path" "podDisruptionBudget"
        "defaults" (dict "maxUnavailable" 1))
      (dict "read" .Values.serviceMonitor.enabled "when" "serviceMonitor.enabled" "values" .Values.serviceMonitor "path" "serviceMonitor"
        "defaults" (dict "interval" "15s"))
      (dict "read" .Values.prometheusRule.enabled "when" "prometheusRule.enabled" "values" .Values.prometheusRule "path" "prometheusRule"
        "defaults" (dict "latencyThresholdSeconds" 1 "minFailures" 5))
-}}
{{- if not .read -}}
{{- $where := . -}}
{{- range $key, $value := .values -}}
{{- $given := and $value (ne (toString $value) "0") -}}
{{- if $where.defaults -}}
{{- $given = and (hasKey $where.defaults $key) (ne (toJson $value) (get $where.defaults $key | toJson)) -}}
{{- end -}}
{{- if $given -}}
{{- fail (printf "%s.%s has no effect without %s. Set that, or remove the value." $where.path $key $where.when) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $lws.enabled -}}
{{- range $key, $default := dict "strategy" (dict "type" "RollingUpdate" "rollingUpdate" (dict "maxSurge" 1 "maxUnavailable" 0)) "minReadySeconds" 0 "progressDeadlineSeconds" 1800 -}}
{{- $value := get $.Values $key -}}
{{- if and (not (kindIs "invalid" $value)) (ne (toJson $value) (toJson $default)) -}}
{{- fail (printf "%s has no effect with leaderWorkerSet.enabled: it is the Deployment's, and there is none then. Remove the value." $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
